"""Ops of several packages together: one graph under torch.compile, one CUDA graph, kernels copied between machines."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tk_core
import tk_moe
import tk_quant
from tk_core.testing import assert_equal

NUM_EXPERTS, NUM_TOPK, HIDDEN, ALIGNMENT = 16, 4, 256, 16
Tensors = tuple[torch.Tensor, ...]


def chain(logits: torch.Tensor, x: torch.Tensor) -> Tensors:
    """Gate, map, quantize, expand, cast back, reduce; without a synchronization."""
    topk_idx = tk_moe.topk_gate(logits, NUM_TOPK)
    _, topk_weights = tk_moe.normalize_weight(logits.sigmoid().gather(1, topk_idx))
    num_expanded = x.shape[0] * NUM_TOPK + (ALIGNMENT - 1) * NUM_EXPERTS
    pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, start, end, count, _ = tk_moe.get_fused_mapping(
        topk_idx, NUM_EXPERTS, num_expanded, ALIGNMENT
    )
    quantized = tk_quant.per_token_cast(x, "e4m3", 128)
    expanded = tk_moe.expand_to_fused_with_sf(quantized, 128, token_topk_to_pos, pos_to_expert)
    rows = tk_quant.per_token_cast_back(expanded, "bf16", 128)
    reduced = tk_moe.reduce_fused(rows, topk_weights, token_topk_to_pos)
    again = tk_moe.expand_to_fused(reduced, token_topk_to_pos, pos_to_expert)
    return pos_to_token, pos_to_token_topk, start, end, count, *expanded, reduced, again


def inputs(num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(num_tokens, NUM_EXPERTS, device=device),
        torch.randn(num_tokens, HIDDEN, device=device, dtype=torch.bfloat16),
    )


def test_one_graph(device: str) -> None:
    graphs = 0

    def counting(module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager" if device == "cpu" else "inductor")(module, example_inputs)

    logits, x = inputs(33, device)
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend=counting)
    assert_equal(compiled(logits, x), chain(logits, x))
    assert graphs == 1


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_inputs() -> None:
    logits, x = inputs(33, "cuda")
    chain(logits, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(logits, x)
    for _ in range(3):
        new_logits, new_x = inputs(33, "cuda")
        logits.copy_(new_logits)
        x.copy_(new_x)
        graph.replay()
        assert_equal(captured, chain(new_logits, new_x))


@pytest.mark.gpu
def test_deterministic_at_any_number_of_sms() -> None:
    logits, x = inputs(257, "cuda")
    expected = chain(logits, x)
    for count in (1, 7, 100):
        with tk_core.num_sms(count):
            assert_equal(chain(logits, x), expected)


USE = """
import torch, tk_quant
from tk_core import compat
x = torch.arange(8192 * 7168, device="cuda", dtype=torch.int32).view(8192, 7168)
for dtype in (torch.float32, torch.float8_e4m3fn, torch.bfloat16):
    y = x.to(dtype)
    assert torch.equal(tk_quant.transpose(y).view(torch.uint8), y.t().contiguous().view(torch.uint8))
print("compilations:", compat.num_compilations)
"""


@pytest.mark.gpu
def test_kernels_compiled_without_a_gpu_run_on_another_machine(tmp_path: Path) -> None:
    """Warm up a cache without a GPU, export it, import it into an empty one, and use that."""

    def python(cache: str, *arguments: str, **more: str) -> str:
        environment = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path / cache), **more}
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600)
        return ran.stdout

    tk, archive = ("-m", "tk_core.cli"), str(tmp_path / "kernels.zip")
    options = ("--set", "widths=[7168]", "--set", "inputs=['bfloat16', 'float32']", "--arch", tk_core.get_arch().name)
    python("built", *tk, "warmup", "tk_quant.transpose", *options, "--jobs", "2", CUDA_VISIBLE_DEVICES="")
    python("built", *tk, "cache", "export", archive)
    python("carried", *tk, "cache", "import", archive)
    assert "compilations: 0" in python("carried", "-c", USE)
