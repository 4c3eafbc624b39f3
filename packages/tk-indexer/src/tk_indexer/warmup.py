"""The calls that a model makes to this package's ops; `tk warmup` compiles the kernels they need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import tk_indexer
from tk_core.cli.profile import Call, call, empty


@dataclass(frozen=True)
class Profile:
    """Section [tk_indexer] of a model's profile."""

    index_topk: int
    """Keys that are selected for a query."""
    max_keys: int
    """The most keys, columns of the scores, that a query is scored against."""
    logits: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """Dtypes of the scores."""
    index_heads: int = 64
    """Heads of an index query."""
    index_dim: int = 128
    """Channels of a head, and of a key."""
    rope: Literal["none", "neox", "interleaved"] = "neox"
    """Which channels of a key are paired when a position rotates them."""
    rope_first: bool = True
    """Whether the first 64 channels are rotated, else the last."""
    hadamard: bool = False
    """Whether a Hadamard transform precedes the casts."""
    tables: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """Dtypes of the table of cosines and sines."""
    keys: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    """Dtypes of keys that are cast."""
    block_kv: int = 64
    """Keys of a block of the cache."""
    next_n: tuple[int, ...] = (1,)
    """Queries of a sequence that a step of decoding scores, 1 to 8; without any, none are scored in a paged cache."""
    operands: tuple[Literal["e4m3", "e2m1"], ...] = ("e4m3",)
    """Dtypes of index queries and keys; without any, none are cast and no scores are computed."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    powers = [1 << bit for bit in range(profile.max_keys.bit_length())]
    for dtype in profile.logits:
        for num_keys in (*powers, profile.max_keys):
            yield call(tk_indexer.topk_indices, empty(num_tokens, num_keys, dtype=dtype), profile.index_topk)
    for fmt in profile.operands:
        yield from _cast_calls(profile, num_tokens, fmt)
        yield from _score_calls(profile, num_tokens, fmt)
        yield from _paged_calls(profile, num_tokens, fmt)


def _cast_calls(profile: Profile, num_tokens: int, fmt: str) -> Iterator[Call]:
    dim, group, widths = profile.index_dim, profile.index_dim, (profile.index_dim,)
    if fmt == "e2m1":
        group, widths = 32, (dim // 2, dim)  # Gathered keys are copied, or widened.
    cache = empty(64, profile.block_kv, widths[0] + 4, dtype=torch.uint8)
    slots = empty(num_tokens, dtype=torch.int64)
    for table in profile.tables if profile.rope != "none" else (None,):
        positions = cos_sin_cache = None
        flags = {"hadamard": profile.hadamard}
        if table is not None:
            positions, cos_sin_cache = slots, empty(64, 64, dtype=getattr(torch, table))
            flags |= {"rope_first": profile.rope_first, "is_neox": profile.rope == "neox"}
        for keys in profile.keys:
            k = empty(num_tokens, dim, dtype=getattr(torch, keys))
            options = {"positions": positions, "cos_sin_cache": cos_sin_cache, **flags}
            yield call(tk_indexer.indexer_k_quant_and_cache, k, cache, slots, group, "ue8m0", **options)
        for dtype in (torch.bfloat16, torch.float32):
            q = empty(num_tokens, profile.index_heads, dim, dtype=torch.bfloat16)
            operands = positions, q, cos_sin_cache, empty(num_tokens, profile.index_heads, dtype=dtype)
            yield call(tk_indexer.fused_indexer_q_rope_quant, *operands, 1.0, 1.0, fmt=fmt, **flags)
    table, bounds = empty(1, 64, dtype=torch.int32), empty(2, dtype=torch.int32)
    for width in widths:
        data = empty(num_tokens, width, dtype=torch.float8_e4m3fn)
        yield call(tk_indexer.cp_gather_indexer_k_quant_cache, cache, data, empty(num_tokens), table, bounds)


def _operand(profile: Profile, fmt: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Rows of data and their factors."""
    if fmt == "e2m1":
        return empty(*shape, profile.index_dim // 2, dtype=torch.int8), empty(*shape, dtype=torch.int32)
    return empty(*shape, profile.index_dim, dtype=torch.float8_e4m3fn), empty(*shape)


def _queries(profile: Profile, fmt: str, *shape: int) -> tuple[Tensor, Tensor | None]:
    data, sf = _operand(profile, fmt, *shape, profile.index_heads)
    return data, sf if fmt == "e2m1" else None


def _score_calls(profile: Profile, num_tokens: int, fmt: str) -> Iterator[Call]:
    weights, window = empty(num_tokens, profile.index_heads), empty(num_tokens, dtype=torch.int32)
    operands = _queries(profile, fmt, num_tokens), _operand(profile, fmt, profile.max_keys), weights, window, window
    for dtype in profile.logits:
        yield call(tk_indexer.fp8_fp4_mqa_logits, *operands, logits_dtype=getattr(torch, dtype))


def _paged_calls(profile: Profile, num_tokens: int, fmt: str) -> Iterator[Call]:
    key_bytes = profile.index_dim // 2 if fmt == "e2m1" else profile.index_dim
    cache = empty(64, profile.block_kv, key_bytes + 4, dtype=torch.uint8)
    tables = empty(num_tokens, 64, dtype=torch.int32), empty(2, 2, dtype=torch.int32)
    for next_n in profile.next_n:
        lengths = empty(num_tokens, next_n, dtype=torch.int32)
        yield call(tk_indexer.get_paged_mqa_logits_metadata, lengths, profile.block_kv, 1)
        q, weights = _queries(profile, fmt, num_tokens, next_n), empty(num_tokens * next_n, profile.index_heads)
        for dtype in profile.logits:
            operands = q, cache, weights, lengths, *tables, profile.max_keys
            yield call(tk_indexer.fp8_fp4_paged_mqa_logits, *operands, logits_dtype=getattr(torch, dtype))
