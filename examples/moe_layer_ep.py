"""The FP8 layer of moe_layer.py with its experts on several ranks: tokens travel to their experts and back.

    uv run torchrun --nproc-per-node 2 examples/moe_layer_ep.py           # two GPUs, or two processes on a CPU
    uv run torchrun --nproc-per-node 2 examples/moe_layer_ep.py --full    # DeepSeek-V3's sizes, also on a CPU

Every rank has its own tokens and a share of the experts. It chooses experts and quantizes its tokens as in
moe_layer.py; `dispatch` sends each token once to every rank that has one of its experts, and gives the receiver a row
for each of its own experts; `combine` brings their outputs back and sums them. The table has the times of rank 0.

For comparison, each rank also runs its tokens through all experts in one process. The result differs from that by the
rounding of sums on each rank, as long as these are allowed; without them the bits are the same.
"""

import os
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from moe_layer import (
    ALIGNMENT,
    FULL,
    NUM_PER_CHANNELS,
    SMALL,
    Experts,
    Full,
    Hidden,
    Intermediate,
    Layer,
    Pair,
    Seed,
    Stages,
    Tokens,
    Topk,
    choose_experts,
    chosen_size,
    exact_layer,
    make_activations,
    make_layer,
    wide_console,
)

import tk_ep
import tk_gemm
import tk_moe
import tk_quant

# The largest relative difference that the rounding of sums on each rank makes: a bfloat16 has 8 bits.
MOST_DIFFERENCE = 2.0**-8


def run_experts(
    rows: Pair,
    experts: tuple[Pair, Pair],
    pos_to_weight: torch.Tensor,
    weights: torch.Tensor,
    pos_to_expert: torch.Tensor,
    stages: Stages,
) -> torch.Tensor:
    """Outputs of the experts, (rows, hidden), times the weights of their rows, which SwiGLU has multiplied."""
    product = tk_gemm.m_grouped_fp8_gemm_nt_contiguous
    gate_up = stages.run("gate and up", product, rows, experts[0], None, pos_to_expert)
    swiglu = tk_quant.swiglu_forward_and_per_token_cast
    maps = {"pos_to_token_topk": pos_to_weight, "topk_weights": weights, "pos_to_expert": pos_to_expert}
    by_column = {"use_tma_aligned_col_major_sf": True}
    rows = stages.run("SwiGLU", swiglu, gate_up, "e4m3", NUM_PER_CHANNELS, **maps, **by_column)
    return stages.run("down", product, rows, experts[1], None, pos_to_expert)


def run_layer(
    buffer: tk_ep.ElasticBuffer, layer: Layer, x: torch.Tensor, topk: int, stages: Stages
) -> tuple[torch.Tensor, torch.Tensor, tk_ep.EPHandle]:
    """The layer with this rank's share of the experts. Also returns the experts' outputs and the routing."""
    num_experts = layer.router.shape[0]
    share = num_experts // buffer.num_ranks
    own = slice(buffer.rank_idx * share, (buffer.rank_idx + 1) * share)
    experts = tuple((data[own], sf[own]) for data, sf in (layer.fp8_gate_up, layer.fp8_down))
    topk_idx, weights = choose_experts(layer, x, topk, stages)
    pair = stages.run("quantize", tk_quant.per_token_cast, x, "e4m3", NUM_PER_CHANNELS)
    options = {"num_experts": num_experts, "expert_alignment": ALIGNMENT, "do_expand": True}
    options |= {"do_zero_padding": True, "use_tma_aligned_col_major_sf": True}
    rows, _, row_weights, handle, _ = stages.run(
        "dispatch", buffer.dispatch, pair, topk_idx, weights, backend=buffer.backend, **options
    )
    each_row = torch.arange(len(row_weights), dtype=torch.int32, device=x.device)
    outputs = run_experts(rows, experts, each_row, row_weights[:, None], handle.pos_to_expert, stages)
    combined, _, _ = stages.run("combine", buffer.combine, outputs, handle, backend=buffer.backend)
    return combined, outputs, handle


def run_in_one_process(layer: Layer, x: torch.Tensor, topk: int, stages: Stages) -> torch.Tensor:
    """The same layer with all experts here."""
    topk_idx, weights = choose_experts(layer, x, topk, stages)
    pair = tk_quant.per_token_cast(x, "e4m3", NUM_PER_CHANNELS)
    mapping = tk_moe.get_fused_mapping(topk_idx, layer.router.shape[0], 0, ALIGNMENT)
    pos_to_expert, pos_to_token_topk, token_topk_to_pos = mapping[0], mapping[2], mapping[3]
    rows = tk_moe.expand_to_fused_with_sf(pair, NUM_PER_CHANNELS, token_topk_to_pos, pos_to_expert, True)
    experts = layer.fp8_gate_up, layer.fp8_down
    outputs = run_experts(rows, experts, pos_to_token_topk, weights, pos_to_expert, stages)
    return tk_moe.reduce_fused(outputs, None, token_topk_to_pos)


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference by that of `exact`."""
    return ((x.float() - exact.float()).norm() / exact.float().norm()).item()


def join_group(device: str) -> torch.device:
    """Join the group that torchrun has started, or one of this process alone; returns this rank's device."""
    alone: dict[str, Any] = {}
    if not dist.is_torchelastic_launched():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def main(
    tokens: Tokens = None,
    hidden: Hidden = None,
    experts: Experts = None,
    topk: Topk = None,
    intermediate: Intermediate = None,
    full: Full = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; GPUs if there are any.")] = None,
    backend: Annotated[str, typer.Option(help="tk-ep's: auto, symmetric or collective.")] = "auto",
    seed: Seed = 0,
) -> None:
    """Run one mixture-of-experts layer in FP8 on all ranks; print rank 0's times, and check it against one process."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"expected cpu or cuda, got {device}", param_hint="--device")
    size = chosen_size(FULL if full or device == "cuda" else SMALL, tokens, hidden, experts, topk, intermediate)
    where = join_group(device)
    group = dist.group.WORLD
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if size.experts % num_ranks:
        raise typer.BadParameter(
            f"expected a multiple of {num_ranks} ranks, got {size.experts}", param_hint="--experts"
        )
    sizes = {"num_max_tokens_per_rank": size.tokens, "hidden": size.hidden, "num_topk": size.topk}
    buffer = tk_ep.ElasticBuffer(group, **sizes, backend=backend)
    rounding_once = tk_ep.ElasticBuffer(group, **sizes, allow_multiple_reduction=False, backend=backend)
    stages, others = (Stages("", where) for _ in range(2))
    shape = f"{size.tokens} tokens × {size.hidden} a rank, {size.topk} of {size.experts} experts × {size.intermediate}"
    stages.table.title = f"FP8: {shape}, on rank 0 of {num_ranks} ({device})"
    with torch.no_grad():
        torch.manual_seed(seed)
        layer = make_layer(size, where)
        torch.manual_seed(seed + 1 + rank)
        x = make_activations(size, where)
        out, outputs, handle = run_layer(buffer, layer, x, size.topk, stages)
        same, _, _ = rounding_once.combine(outputs, handle)
        alone = run_in_one_process(layer, x, size.topk, others)
        # The worst of all ranks.
        worst = torch.tensor([relative(out, exact_layer(layer, x, size.topk)), relative(out, alone)], device=where)
        worst = torch.cat((worst, (same != alone).any().float()[None]))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    buffer.destroy()
    rounding_once.destroy()
    dist.destroy_process_group()
    error, difference, differs = worst.tolist()
    if rank == 0:
        console = wide_console()
        console.print(stages.table)
        console.print(f"FP8: all stages {stages.total * 1e3:,.3f} ms, relative error {error:.4f}")
        console.print(f"relative difference to one process {difference:.6f}; without sums on each rank ", end="")
        console.print("there are other bits" if differs else "the bits are the same")
    if differs or difference > MOST_DIFFERENCE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
