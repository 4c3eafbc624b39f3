"""One mixture-of-experts layer with DeepSeek-V3's sizes, stage by stage, with the time and memory traffic of each.

    uv run examples/moe_layer.py            # on a GPU the whole layer, on a CPU a small one
    uv run examples/moe_layer.py --full     # the whole layer anywhere: 22.5 GB of expert weights

Each token chooses its experts (the best `topk` by sigmoid scores, with normalized weights). Its row is quantized to
e4m3 with one scale factor for 128 channels and copied into a segment of rows for each of these experts. The experts
apply their SwiGLU, and a weighted sum of their outputs is the result. The matrix products are plain torch; everything
between them is an op of tk-quant or tk-moe: its kernel on a GPU, its reference on a CPU.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import tk_moe
import tk_quant
from tk_core.op import uses_reference

# Alignment of segments: torch's and most other grouped matrix products need a multiple of 16 rows.
ALIGNMENT = 16
NUM_PER_CHANNELS = 128
# Real activations have a few channels far larger than the rest, which decide the error of quantization.
OUTLIER_CHANNELS = 0.01
OUTLIER_SCALE = 30.0


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one layer."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    intermediate: int


FULL = LayerSize(tokens=4096, hidden=7168, experts=256, topk=8, intermediate=2048)
SMALL = LayerSize(tokens=256, hidden=512, experts=16, topk=4, intermediate=256)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, bf16 except the router."""

    router: torch.Tensor
    """float32 (experts, hidden): in bf16 many scores would be equal"""
    gate_up: torch.Tensor
    """(experts, 2 * intermediate, hidden): rows of the SwiGLU's gate, then those of its linear half"""
    down: torch.Tensor
    """(experts, hidden, intermediate)"""


def make_layer(size: LayerSize, device: torch.device) -> Layer:
    """Random weights that preserve the variance of their inputs."""

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(shape[-1] ** -0.5)

    return Layer(
        router=weights(size.experts, size.hidden).float(),
        gate_up=weights(size.experts, 2 * size.intermediate, size.hidden),
        down=weights(size.experts, size.hidden, size.intermediate),
    )


def make_activations(size: LayerSize, device: torch.device) -> torch.Tensor:
    """bf16 (tokens, hidden), normal, with a share of outlier channels."""
    channels = torch.ones(size.hidden, device=device)
    channels[torch.rand(size.hidden, device=device) < OUTLIER_CHANNELS] = OUTLIER_SCALE
    x = torch.randn((size.tokens, size.hidden), device=device) * channels
    return (x * x.square().mean(1, keepdim=True).rsqrt()).bfloat16()


def router_scores(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores float32 (tokens, experts)."""
    return torch.sigmoid(x.float() @ layer.router.t())


def swiglu(layer: Layer, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One expert on its rows."""
    gate, up = (x @ layer.gate_up[expert].t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ layer.down[expert].t()


def plain_layer(layer: Layer, x: torch.Tensor, topk: int) -> torch.Tensor:
    """The same layer in plain bf16 PyTorch: nothing is quantized, nothing is moved into segments."""
    scores, experts = router_scores(layer, x).topk(topk, dim=1)
    weights = scores / scores.sum(1, keepdim=True)
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(layer.router.shape[0]):
        token, slot = (experts == expert).nonzero(as_tuple=True)
        out.index_add_(0, token, swiglu(layer, expert, x[token]).float() * weights[token, slot, None])
    return out.bfloat16()


def run_experts(layer: Layer, rows: torch.Tensor, rows_per_expert: list[int]) -> torch.Tensor:
    """Each expert's SwiGLU on its segment of rows; rows past the last segment are not written."""
    out = torch.empty_like(rows)
    start = 0
    for expert, num_rows in enumerate(rows_per_expert):
        if num_rows:
            out[start : start + num_rows] = swiglu(layer, expert, rows[start : start + num_rows])
        start += num_rows
    return out


def bytes_of(tree: Any) -> int:
    """Bytes of all tensors in nested tuples and lists."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    return sum(map(bytes_of, tree)) if isinstance(tree, tuple | list) else 0


class Stages:
    """Runs stages one after the other and keeps a table of their times."""

    def __init__(self, title: str, device: torch.device) -> None:
        self.device = device
        self.table = Table(
            title=title, caption="MB: each input and output once. Time: median after warm-up, caches warm."
        )
        for heading in ("stage", "op", "backend"):
            self.table.add_column(heading)
        for heading in ("time", "MB", "GB/s"):
            self.table.add_column(heading, justify="right")
        self.total = 0.0

    def seconds(self, call: Callable[[], Any]) -> float:
        """Time of a call: on a GPU the median of ten by CUDA events, after two for warm-up; on a CPU one call."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        times = []
        for repeat in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if repeat >= 2:
                times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def run(self, stage: str, op: Callable[..., Any], *inputs: Any, backend: str | None = None, read: Any = ()) -> Any:
        """Outputs of `op(*inputs)`, which is timed; `read` has further tensors that it reads."""
        outputs = op(*inputs)
        seconds = self.seconds(lambda: op(*inputs))
        moved = bytes_of(inputs) + bytes_of(read) + bytes_of(outputs)
        if backend is None:
            backend = "reference" if uses_reference(self.device) else "kernel"
        name = getattr(op, "__name__", str(op))
        self.table.add_row(
            stage, name, backend, f"{seconds * 1e6:,.0f} µs", f"{moved / 1e6:,.2f}", f"{moved / seconds / 1e9:,.2f}"
        )
        self.total += seconds
        return outputs


def run_layer(layer: Layer, x: torch.Tensor, topk: int, stages: Stages) -> torch.Tensor:
    """The layer, made of tk ops."""
    num_experts = layer.router.shape[0]
    scores = stages.run("score", router_scores, layer, x, backend="torch", read=layer.router)
    topk_idx = stages.run("gate", tk_moe.topk_gate, scores, topk)
    _, weights = stages.run("normalize", tk_moe.normalize_weight, scores.gather(1, topk_idx))
    mapping = stages.run("map", tk_moe.get_fused_mapping, topk_idx, num_experts, 0, ALIGNMENT)
    pos_to_expert, token_topk_to_pos, rows_per_expert = mapping[0], mapping[3], mapping[7]
    pair = stages.run("quantize", tk_quant.per_token_cast, x, "e4m3", NUM_PER_CHANNELS)
    rows = stages.run(
        "expand", tk_moe.expand_to_fused_with_sf, pair, NUM_PER_CHANNELS, token_topk_to_pos, pos_to_expert
    )
    rows = stages.run("dequantize", tk_quant.per_token_cast_back, rows, "bf16", NUM_PER_CHANNELS)
    rows = stages.run(
        "experts", run_experts, layer, rows, rows_per_expert, backend="torch", read=(layer.gate_up, layer.down)
    )
    return stages.run("reduce", tk_moe.reduce_fused, rows, weights, token_topk_to_pos)


def main(
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in the batch.")] = None,
    hidden: Annotated[int | None, typer.Option(min=64, help="Channels of a token, a multiple of 64.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Number of experts.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Channels inside an expert.")] = None,
    full: Annotated[bool, typer.Option("--full", help="DeepSeek-V3's sizes, also on a CPU.")] = False,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and activations.")] = 0,
) -> None:
    """Run one mixture-of-experts layer and print what each stage takes and how far the result is from plain bf16."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    default = FULL if full or where.type == "cuda" else SMALL
    size = LayerSize(
        tokens=tokens or default.tokens,
        hidden=hidden or default.hidden,
        experts=experts or default.experts,
        topk=topk or default.topk,
        intermediate=intermediate or default.intermediate,
    )
    if size.hidden % 64:
        raise typer.BadParameter(f"expected a multiple of 64, got {size.hidden}", param_hint="--hidden")
    if size.topk > size.experts:
        raise typer.BadParameter(f"expected at most {size.experts} experts, got {size.topk}", param_hint="--topk")
    torch.manual_seed(seed)
    with torch.no_grad():
        layer, x = make_layer(size, where), make_activations(size, where)
        shape = f"{size.tokens} tokens × {size.hidden}, {size.topk} of {size.experts} experts × {size.intermediate}"
        stages = Stages(f"{shape} on {where}", where)
        out = run_layer(layer, x, size.topk, stages).float()
        plain = plain_layer(layer, x, size.topk).float()
    error = ((out - plain).norm() / plain.norm()).item()
    # Wide enough for every column where the output is not a terminal.
    console = Console(width=None if Console().is_terminal else 120)
    console.print(stages.table)
    console.print(f"all stages: {stages.total * 1e3:,.3f} ms")
    console.print(f"relative error against plain bf16 PyTorch: {error:.4f}")


if __name__ == "__main__":
    typer.run(main)
