"""Ops of several packages together: one graph under torch.compile, one CUDA graph, kernels copied between machines."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tk_moe
import tk_quant
from tk_core.testing import assert_equal

NUM_EXPERTS, NUM_TOPK, HIDDEN, ALIGNMENT = 16, 4, 256, 16
Tensors = tuple[torch.Tensor, ...]


def num_expanded(num_tokens: int) -> int:
    return num_tokens * NUM_TOPK + (ALIGNMENT - 1) * NUM_EXPERTS


def chain(logits: torch.Tensor, x: torch.Tensor) -> Tensors:
    """Gate, map, quantize, expand, cast back, reduce; without a synchronization."""
    topk_idx = tk_moe.topk_gate(logits, NUM_TOPK)
    _, topk_weights = tk_moe.normalize_weight(logits.sigmoid().gather(1, topk_idx))
    pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, start, end, count, _ = tk_moe.get_fused_mapping(
        topk_idx, NUM_EXPERTS, num_expanded(x.shape[0]), ALIGNMENT
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


def check_one_graph(device: str, backend: str) -> None:
    graphs = 0

    def counting(module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(module, example_inputs)

    logits, x = inputs(33, device)
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend=counting)
    assert_equal(compiled(logits, x), chain(logits, x))
    assert graphs == 1


def test_one_graph_on_a_cpu() -> None:
    check_one_graph("cpu", "aot_eager")


@pytest.mark.gpu
def test_one_graph_on_a_gpu() -> None:
    check_one_graph("cuda", "inductor")


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
    import tk_core

    logits, x = inputs(257, "cuda")
    expected = chain(logits, x)
    for count in (1, 7, 100):
        with tk_core.num_sms(count):
            assert_equal(chain(logits, x), expected)


OP = "tk_quant.transpose"
USE = """
import sys, torch, tk_quant
from tk_core import compat
from tk_core.arch import arch_from_name
from tk_core.kernel import capture
if sys.argv[1] == "run":
    x = torch.arange(8192 * 7168, device="cuda", dtype=torch.int32).view(8192, 7168)
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bfloat16):
        y = x.to(dtype)
        assert torch.equal(tk_quant.transpose(y).view(torch.uint8), y.t().contiguous().view(torch.uint8))
else:
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bfloat16):
        with capture(arch_from_name(sys.argv[1])) as requests:
            tk_quant.transpose(torch.empty(8192, 7168, dtype=dtype, device="meta"))
        for request in requests:
            request.compile()
print("compilations:", compat.num_compilations)
"""


def carry(tmp_path: Path, arch: str, use: str) -> str:
    """Warm up a cache without a GPU, export it, import it into an empty one, and run `USE` with that."""

    def environment(cache: str, **more: str) -> dict[str, str]:
        return {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path / cache), **more}

    def tk(cache: str, *arguments: str, **more: str) -> None:
        command = [sys.executable, "-m", "tk_core.cli", *arguments]
        subprocess.run(command, env=environment(cache, **more), check=True, capture_output=True, timeout=600)

    archive = str(tmp_path / "kernels.tar.gz")
    overrides = ("--set", "widths=[7168]", "--set", "inputs=['bfloat16', 'float32']")
    tk("built", "warmup", OP, *overrides, "--arch", arch, "--jobs", "2", CUDA_VISIBLE_DEVICES="")
    tk("built", "cache", "export", archive)
    tk("carried", "cache", "import", archive)
    command = [sys.executable, "-c", USE, use]
    result = subprocess.run(
        command, env=environment("carried"), check=True, capture_output=True, text=True, timeout=600
    )
    return result.stdout


@pytest.mark.compile
def test_carried_kernels_are_found(tmp_path: Path) -> None:
    assert "compilations: 0" in carry(tmp_path, "sm_90a", "sm_90a")


@pytest.mark.gpu
def test_carried_kernels_run_without_compiling(tmp_path: Path) -> None:
    assert "compilations: 0" in carry(tmp_path, tk_core_arch(), "run")


def tk_core_arch() -> str:
    from tk_core import get_arch

    return get_arch().name
