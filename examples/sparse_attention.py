"""A step of decoding with DeepSeek's sparse attention: an indexer scores all keys, attention reads the best of them.

    uv run examples/sparse_attention.py            # 4 sequences of 4096 keys
    uv run examples/sparse_attention.py --full     # 32 sequences of 131072 keys; takes a GPU with 16 GB free

Attention is latent multi-query attention: 16 heads read the same latents of 512 channels, which are keys and values.
Each latent belongs to one of 32 topics, and each sequence's queries look for one. The indexer has 64 heads of 128
channels: its queries are mixes of attention's, its keys are latents, both through one random projection. Keys and
latents are in paged caches. Of every stage the table has the time and the bytes it moves, beside dense attention.

A second table compares choices of keys: by scores of float32, FP8 and FP4, the ideal one by attention's own weights,
and a random one. It says how much of dense attention's weight falls on the chosen keys, and how far the output is off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import torch
import typer
from moe_layer import Seed, Stages, device_named, wide_console
from rich.table import Table
from torch import Tensor

import tk_core
import tk_indexer

HEADS, CHANNELS = 16, 512
INDEX_HEADS, INDEX_DIM = 64, 128
BLOCK = 64
TOPICS = 32
MOST_CHOSEN = 2048


@dataclass(frozen=True)
class Size:
    """Sizes of a step; each sequence has one query."""

    seqs: int
    keys: int

    @property
    def chosen(self) -> int:
        """Keys that attention reads for a query."""
        return min(self.keys // 8, MOST_CHOSEN)


FULL, SMALL = Size(32, 131072), Size(4, 4096)


@dataclass(frozen=True)
class Step:
    """What a step of decoding has before it."""

    q: Tensor
    """bf16 (seqs, HEADS, CHANNELS)"""
    latents: Tensor
    """bf16 (seqs, keys, CHANNELS), in the order of positions"""
    latent_cache: Tensor
    """bf16 (blocks · BLOCK, CHANNELS), in the order of slots"""
    block_table: Tensor
    """int32 (seqs, keys / BLOCK)"""
    index_q: Tensor
    """float32 (seqs, INDEX_HEADS, INDEX_DIM)"""
    index_k: Tensor
    """float32 (seqs, keys, INDEX_DIM)"""

    @property
    def lengths(self) -> Tensor:
        """int32 (seqs, 1): the keys that each query sees."""
        seqs, keys, _ = self.latents.shape
        return torch.full((seqs, 1), keys, dtype=torch.int32, device=self.q.device)

    def slots(self, columns: Tensor) -> Tensor:
        """int64 slots in the caches of positions (seqs, n)."""
        return self.block_table.long().gather(1, columns.long() // BLOCK) * BLOCK + columns % BLOCK


def make_step(size: Size, device: torch.device) -> Step:
    """Latents are their topic and noise; queries 0.35 of their sequence's topic and 0.5 of noise."""
    topics = torch.randn(TOPICS, CHANNELS, device=device)
    projection = torch.randn(CHANNELS, INDEX_DIM, device=device) * CHANNELS**-0.5
    wanted = torch.randint(TOPICS, (size.seqs,), device=device)
    q = 0.35 * topics[wanted][:, None] + 0.5 * torch.randn(size.seqs, HEADS, CHANNELS, device=device)
    mixes = torch.rand(INDEX_HEADS, HEADS, device=device)
    latents = torch.empty(size.seqs, size.keys, CHANNELS, dtype=torch.bfloat16, device=device)
    for latent in latents:
        topic = topics[torch.randint(TOPICS, (size.keys,), device=device)]
        latent.copy_(topic + torch.randn(size.keys, CHANNELS, device=device))
    block_table = torch.randperm(size.seqs * size.keys // BLOCK, device=device).view(size.seqs, -1).int()
    latent_cache = torch.empty(block_table.numel(), BLOCK, CHANNELS, dtype=torch.bfloat16, device=device)
    latent_cache[block_table.flatten().long()] = latents.view(-1, BLOCK, CHANNELS)
    index_k = torch.stack([latent.float() @ projection for latent in latents])
    index_q = (mixes / mixes.sum(dim=1, keepdim=True)) @ q @ projection
    return Step(q.bfloat16(), latents, latent_cache.flatten(0, 1), block_table, index_q, index_k)


def attend(q: Tensor, keys: Tensor) -> Tensor:
    """Attention's output (seqs, HEADS, CHANNELS) of queries and the latents (seqs, n, CHANNELS) that they read."""
    weights = ((q @ keys.mT).float() * CHANNELS**-0.5).softmax(dim=2)
    return weights.to(keys.dtype) @ keys


def dense_weights(step: Step) -> Tensor:
    """float32 (seqs, keys): dense attention's weight of each key, the mean of the heads."""
    pairs = zip(step.q.float(), step.latents)
    return torch.stack([((q @ k.float().mT) * CHANNELS**-0.5).softmax(dim=1).mean(dim=0) for q, k in pairs])


def named(op: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    """The op with some arguments given, whose bytes are not counted."""
    return wraps(op)(lambda *args, **options: op(*args, **given, **options))


def key_format(fmt: str) -> dict[str, Any]:
    """How keys are cast: factors are powers of two, for a whole key or for 32 channels."""
    return {"quant_block_size": INDEX_DIM if fmt == "e4m3" else 32, "scale_fmt": "ue8m0", "hadamard": True}


def new_cache(step: Step, fmt: str) -> Tensor:
    """A cache of all index keys, e4m3 with one factor for a key, or e2m1 with one for 32 channels."""
    data_bytes = INDEX_DIM if fmt == "e4m3" else INDEX_DIM // 2
    blocks = step.block_table.numel()
    cache = torch.zeros(blocks, BLOCK, data_bytes + 4, dtype=torch.uint8, device=step.q.device)
    positions = torch.arange(step.latents.shape[1], device=step.q.device).expand(step.latents.shape[0], -1)
    slots = step.slots(positions).flatten()
    tk_indexer.indexer_k_quant_and_cache(step.index_k.flatten(0, 1), cache, slots, **key_format(fmt))
    return cache


def choose(step: Step, cache: Tensor, fmt: str, stages: Stages) -> tuple[Tensor, Tensor]:
    """The chosen keys, ascending: positions and slots, int32 (seqs, chosen)."""
    seqs, keys, _ = step.latents.shape
    size, device = Size(seqs, keys), step.q.device
    newest = step.slots(torch.full((seqs, 1), keys - 1, device=device)).flatten()
    add_key = named(tk_indexer.indexer_k_quant_and_cache, kv_cache=cache, slot_mapping=newest, **key_format(fmt))
    stages.run("cast the new key", add_key, step.index_k[:, -1].contiguous())
    head_weights = torch.ones(seqs, INDEX_HEADS, device=device)
    scales = INDEX_DIM**-0.5, INDEX_HEADS**-0.5
    cast = tk_indexer.fused_indexer_q_rope_quant
    operands = None, step.index_q.bfloat16(), None, head_weights, *scales
    q, weights = stages.run("cast queries", cast, *operands, fmt=fmt, hadamard=True)
    scores = score(step, q, cache, weights, stages)
    columns = torch.empty(seqs, size.chosen, dtype=torch.int32, device=device)
    pages = {"block_table": step.block_table, "block_size": BLOCK, "raw_out": columns}
    slots = stages.run("select", tk_indexer.topk_indices, scores, size.chosen, None, step.lengths.view(-1), **pages)
    return columns, slots


def score(step: Step, q: Tensor | tuple[Tensor, Tensor], cache: Tensor, weights: Tensor, stages: Stages) -> Tensor:
    """float32 (seqs, keys); queries in FP4 are a pair of data and factors."""
    device, keys = step.q.device, step.latents.shape[1]
    num_sms = tk_core.get_num_sms(device) if device.type == "cuda" else 1
    schedule = stages.run("schedule", tk_indexer.get_paged_mqa_logits_metadata, step.lengths, BLOCK, num_sms)
    pair = tuple(x[:, None] for x in q) if isinstance(q, tuple) else (q[:, None], None)
    operands = pair, cache, weights, step.lengths, step.block_table, schedule, keys
    return stages.run("score", tk_indexer.fp8_fp4_paged_mqa_logits, *operands)


def run_step(step: Step, fmt: str, title: str) -> tuple[Stages, Tensor, Tensor]:
    """The stages, the chosen positions, and attention's output (seqs, HEADS, CHANNELS)."""
    device = step.q.device
    stages = Stages(title, device)
    columns, slots = choose(step, new_cache(step, fmt), fmt, stages)

    def sparse_attention(q: Tensor, slots: Tensor) -> Tensor:
        return attend(q, step.latent_cache[slots.long()])

    read = step.latent_cache[: slots.numel()]
    out = stages.run("attend", sparse_attention, step.q, slots, backend="torch", read=read)
    return stages, columns, out


def run_dense(step: Step, stages: Stages) -> Tensor:
    """Attention's output if it reads all latents."""
    return stages.run("dense instead", attend, step.q, step.latents, backend="torch")


def compare(step: Step, choices: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Of each choice of positions the share of dense weight that it covers, and the relative error of the output."""
    weights = dense_weights(step)
    dense = torch.cat([attend(q[None].float(), k[None].float()) for q, k in zip(step.q, step.latents)])
    found = {}
    for name, columns in choices.items():
        columns = columns.long()
        share = weights.gather(1, columns).sum(dim=1).mean().item()
        chosen = step.latents.gather(1, columns[..., None].expand(-1, -1, CHANNELS)).float()
        out = attend(step.q.float(), chosen)
        found[name] = share, ((out - dense).norm() / dense.norm()).item()
    return found


def float32_scores(step: Step) -> Tensor:
    """The indexer's scores without any cast."""
    pairs = zip(step.index_q, step.index_k)
    return torch.stack([(q @ k.mT).clamp(min=0).sum(dim=0) for q, k in pairs])


def main(
    full: Annotated[bool, typer.Option("--full", help="32 sequences of 131072 keys, on a GPU.")] = False,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU if there is one.")] = None,
    seed: Seed = 0,
) -> None:
    """Choose keys by scores in FP8 and FP4 and attend to them; print times, and what each choice covers."""
    where = device_named(device)
    if full and where.type != "cuda":
        message = f"expected a GPU for {FULL.seqs} sequences of {FULL.keys} keys, got {where}"
        raise typer.BadParameter(message, param_hint="--full")
    size = FULL if full else SMALL
    torch.manual_seed(seed)
    console = wide_console()
    with torch.no_grad():
        step = make_step(size, where)
        choices = {"float32": float32_scores(step).topk(size.chosen).indices}
        for name, fmt in (("FP8", "e4m3"), ("FP4", "e2m1")):
            title = f"{name}: {size.seqs} sequences of {size.keys} keys, {size.chosen} chosen, on {where}"
            stages, choices[name], _ = run_step(step, fmt, title)
            total = stages.total
            run_dense(step, stages)
            console.print(stages.table)
            console.print(f"{name}: all stages {total * 1e3:,.3f} ms, dense {(stages.total - total) * 1e3:,.3f} ms\n")
        choices["ideal"] = dense_weights(step).topk(size.chosen).indices
        choices["random"] = torch.rand(size.seqs, size.keys, device=where).topk(size.chosen).indices
        table = Table(title=f"{size.chosen} of {size.keys} keys, chosen by")
        table.add_column("scores")
        for heading in ("dense weight covered", "error of the output"):
            table.add_column(heading, justify="right")
        for name, (share, error) in compare(step, choices).items():
            table.add_row(name, f"{share:.4f}", f"{error:.4f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
