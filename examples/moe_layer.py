"""One mixture-of-experts layer with DeepSeek-V3's sizes, stage by stage, with the time and memory traffic of each.

    uv run examples/moe_layer.py            # on a GPU the whole layer, on a CPU a small one
    uv run examples/moe_layer.py --full     # the whole layer anywhere: 34 GB of expert weights

Each token chooses its experts (the best `topk` by sigmoid scores, with normalized weights). Its row is quantized to
e4m3 with one scale factor for 128 channels and copied into a segment of rows for each of these experts. An expert is
two FP8 matrix products with a SwiGLU between them; a weighted sum of the experts' outputs is the result. Every stage
but the scores' sigmoid is an op of tk-quant, tk-moe or tk-gemm: its kernel on a GPU, its reference on a CPU. For
comparison the same layer follows in bf16, with tk-gemm's grouped products and with torch's.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import tk_gemm
import tk_moe
import tk_quant
from tk_core.serving import uses_reference

# Segments begin at multiples of this many rows, as the grouped products require.
ALIGNMENT = 128
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


Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, those of the experts in bf16 and as e4m3 with a scale factor for 128 × 128 of them."""

    router: torch.Tensor
    """float32 (experts, hidden): in bf16 many scores would be equal"""
    gate_up: torch.Tensor
    """(experts, 2 * intermediate, hidden): rows of the SwiGLU's gate, then those of its linear half"""
    down: torch.Tensor
    """(experts, hidden, intermediate)"""
    fp8_gate_up: Pair
    fp8_down: Pair


def quantize_weights(weights: torch.Tensor) -> Pair:
    """Weights (experts, rows, columns) as e4m3 with a factor for each 128 × 128; rows are a multiple of 128."""
    data, sf = tk_quant.per_block_cast(weights.flatten(0, 1), "e4m3", (NUM_PER_CHANNELS, NUM_PER_CHANNELS))
    num_experts = weights.shape[0]
    return data.unflatten(0, (num_experts, -1)), sf.unflatten(0, (num_experts, -1))


def make_layer(size: LayerSize, device: torch.device) -> Layer:
    """Random weights that preserve the variance of their inputs."""

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(shape[-1] ** -0.5)

    gate_up = weights(size.experts, 2 * size.intermediate, size.hidden)
    down = weights(size.experts, size.hidden, size.intermediate)
    return Layer(
        router=weights(size.experts, size.hidden).float(),
        gate_up=gate_up,
        down=down,
        fp8_gate_up=quantize_weights(gate_up),
        fp8_down=quantize_weights(down),
    )


def make_activations(size: LayerSize, device: torch.device) -> torch.Tensor:
    """bf16 (tokens, hidden), normal, with a share of outlier channels."""
    channels = torch.ones(size.hidden, device=device)
    channels[torch.rand(size.hidden, device=device) < OUTLIER_CHANNELS] = OUTLIER_SCALE
    x = torch.randn((size.tokens, size.hidden), device=device) * channels
    return (x * x.square().mean(1, keepdim=True).rsqrt()).bfloat16()


def router_scores(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores float32 (tokens, experts)."""
    return tk_gemm.router_gemm_nt(x, layer.router).sigmoid_()


def exact_layer(layer: Layer, x: torch.Tensor, topk: int) -> torch.Tensor:
    """The same layer expert by expert in float32: nothing is rounded on the way, nothing is moved into segments."""
    scores, experts = router_scores(layer, x).topk(topk, dim=1)
    weights = scores / scores.sum(1, keepdim=True)
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(layer.router.shape[0]):
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ layer.gate_up[expert].float().t()).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ layer.down[expert].float().t()
        out.index_add_(0, token, rows * weights[token, slot, None])
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

    def run(
        self,
        stage: str,
        op: Callable[..., Any],
        *inputs: Any,
        backend: str | None = None,
        read: Any = (),
        **options: Any,
    ) -> Any:
        """Run and time `op(*inputs, **options)`, and return its outputs; `read` has further tensors that it reads."""
        outputs = op(*inputs, **options)
        seconds = self.seconds(lambda: op(*inputs, **options))
        moved = bytes_of(inputs) + bytes_of(list(options.values())) + bytes_of(read) + bytes_of(outputs)
        if backend is None:
            backend = "reference" if uses_reference(self.device) else "kernel"
        name = getattr(op, "__name__", str(op))
        self.table.add_row(
            stage, name, backend, f"{seconds * 1e6:,.0f} µs", f"{moved / 1e6:,.2f}", f"{moved / seconds / 1e9:,.2f}"
        )
        self.total += seconds
        return outputs


@dataclass(frozen=True)
class Routing:
    """Where the rows of each token go."""

    weights: torch.Tensor
    """float32 (tokens, topk)"""
    token_topk_to_pos: torch.Tensor
    """int32 (tokens, topk): the row of each pair of a token and an expert"""
    pos_to_expert: torch.Tensor
    """int32 (rows): the expert of each row, -1 in the padding between segments"""
    ends: torch.Tensor
    """int32 (experts): where segments end, padding included"""


def choose_experts(layer: Layer, x: torch.Tensor, topk: int, stages: Stages) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 (tokens, topk), and their weights."""
    scores = stages.run("score", router_scores, layer, x, read=layer.router)
    topk_idx = stages.run("gate", tk_moe.topk_gate, scores, topk)
    _, weights = stages.run("normalize", tk_moe.normalize_weight, scores.gather(1, topk_idx))
    return topk_idx, weights


def route(layer: Layer, x: torch.Tensor, topk: int, stages: Stages) -> Routing:
    """Choose experts, and give each expert a segment of rows."""
    topk_idx, weights = choose_experts(layer, x, topk, stages)
    mapping = stages.run("map", tk_moe.get_fused_mapping, topk_idx, layer.router.shape[0], 0, ALIGNMENT)
    return Routing(weights, mapping[3], mapping[0], mapping[5])


def run_layer(layer: Layer, x: torch.Tensor, topk: int, stages: Stages) -> torch.Tensor:
    """The layer in FP8, made of tk ops."""
    routing = route(layer, x, topk, stages)
    pos_to_expert = routing.pos_to_expert
    by_column = {"use_tma_aligned_col_major_sf": True}  # The order in which the products read factors.
    pair = stages.run("quantize", tk_quant.per_token_cast, x, "e4m3", NUM_PER_CHANNELS)
    maps = routing.token_topk_to_pos, pos_to_expert
    rows = stages.run("expand", tk_moe.expand_to_fused_with_sf, pair, NUM_PER_CHANNELS, *maps, **by_column)
    product = tk_gemm.m_grouped_fp8_gemm_nt_contiguous
    gate_up = stages.run("gate and up", product, rows, layer.fp8_gate_up, None, pos_to_expert)
    swiglu = tk_quant.swiglu_forward_and_per_token_cast
    rows = stages.run("SwiGLU", swiglu, gate_up, "e4m3", NUM_PER_CHANNELS, pos_to_expert=pos_to_expert, **by_column)
    rows = stages.run("down", product, rows, layer.fp8_down, None, pos_to_expert)
    return stages.run("reduce", tk_moe.reduce_fused, rows, routing.weights, routing.token_topk_to_pos)


def run_bf16_layer(layer: Layer, x: torch.Tensor, topk: int, stages: Stages, by_torch: bool = False) -> torch.Tensor:
    """The same layer in bf16, its SwiGLU torch's, and with `by_torch` its products."""
    routing = route(layer, x, topk, stages)
    pos_to_expert, ends = routing.pos_to_expert, routing.ends

    def grouped_mm(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(rows, weights.mT, offs=ends)

    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def product(stage: str, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if by_torch:
            return stages.run(stage, grouped_mm, rows, weights, backend="torch")
        return stages.run(stage, tk_gemm.m_grouped_bf16_gemm_nt_contiguous, rows, weights, None, pos_to_expert)

    rows = stages.run("expand", tk_moe.expand_to_fused, x, routing.token_topk_to_pos, pos_to_expert)
    gate_up = product("gate and up", rows, layer.gate_up)
    rows = stages.run("SwiGLU", swiglu, gate_up, backend="torch")
    rows = product("down", rows, layer.down)
    return stages.run("reduce", tk_moe.reduce_fused, rows, routing.weights, routing.token_topk_to_pos)


def device_named(name: str | None) -> torch.device:
    """The device of this name; without a name a GPU if there is one, else the CPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
        why = "" if device.type in ("cpu", "cuda") else "the ops run on these two only"
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
    if why:
        raise typer.BadParameter(f"expected cpu, cuda or cuda:N, got {name} ({why})", param_hint="--device")
    return device


Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens in the batch.")]
Hidden = Annotated[int | None, typer.Option(min=128, help="Channels of a token, a multiple of 128.")]
Experts = Annotated[int | None, typer.Option(min=8, max=1024, help="Number of experts, a multiple of 8.")]
Topk = Annotated[int | None, typer.Option(min=1, max=32, help="Experts of a token.")]
Intermediate = Annotated[int | None, typer.Option(min=128, help="Channels inside an expert, a multiple of 128.")]
Full = Annotated[bool, typer.Option("--full", help="DeepSeek-V3's sizes, also on a CPU.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights and activations.")]


def chosen_size(
    default: LayerSize,
    tokens: int | None,
    hidden: int | None,
    experts: int | None,
    topk: int | None,
    intermediate: int | None,
) -> LayerSize:
    """The sizes that the options ask for."""
    size = LayerSize(
        tokens=tokens or default.tokens,
        hidden=hidden or default.hidden,
        experts=experts or default.experts,
        topk=topk or default.topk,
        intermediate=intermediate or default.intermediate,
    )
    for name, divisor in {"hidden": 128, "intermediate": 128, "experts": 8}.items():
        if getattr(size, name) % divisor:
            message = f"expected a multiple of {divisor}, got {getattr(size, name)}"
            raise typer.BadParameter(message, param_hint=f"--{name}")
    if size.topk > size.experts:
        raise typer.BadParameter(f"expected at most {size.experts} experts, got {size.topk}", param_hint="--topk")
    return size


def wide_console() -> Console:
    """A console wide enough for every column where the output is not a terminal."""
    return Console(width=None if Console().is_terminal else 120)


def main(
    tokens: Tokens = None,
    hidden: Hidden = None,
    experts: Experts = None,
    topk: Topk = None,
    intermediate: Intermediate = None,
    full: Full = False,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU if there is one.")] = None,
    seed: Seed = 0,
) -> None:
    """Run one mixture-of-experts layer in FP8 and in bf16; print each stage's time, and the error against float32."""
    where = device_named(device)
    default = FULL if full or where.type == "cuda" else SMALL
    size = chosen_size(default, tokens, hidden, experts, topk, intermediate)
    torch.manual_seed(seed)
    console = wide_console()
    layers = {"FP8": run_layer, "bf16": run_bf16_layer}
    if hasattr(torch.nn.functional, "grouped_mm"):
        layers["bf16, products by torch"] = partial(run_bf16_layer, by_torch=True)
    with torch.no_grad():
        layer, x = make_layer(size, where), make_activations(size, where)
        exact = exact_layer(layer, x, size.topk)
        shape = f"{size.tokens} tokens × {size.hidden}, {size.topk} of {size.experts} experts × {size.intermediate}"
        for name, run in layers.items():
            stages = Stages(f"{name}: {shape} on {where}", where)
            out = run(layer, x, size.topk, stages).float()
            error = ((out - exact).norm() / exact.norm()).item()
            console.print(stages.table)
            console.print(f"{name}: all stages {stages.total * 1e3:,.3f} ms, relative error {error:.4f}\n")


if __name__ == "__main__":
    typer.run(main)
