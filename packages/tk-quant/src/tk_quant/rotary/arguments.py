"""Arguments that the ops of RoPE share: checks, and which of them a kernel is compiled for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tk_core import check
from tk_core.tiles import DIRECT_COPIES

# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}
_DTYPES = (torch.bfloat16, torch.float32)
_POSITION_DTYPES = (torch.int32, torch.int64)
_MOST_ROWS = 2**31 - 2**12
"""Rows are counted in int32, those of a tile past the last row too."""


@dataclass(frozen=True)
class RotarySource:
    """What a kernel reads: dtypes, dimensions, and the alignment in bytes of rows."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    position_dtype: torch.dtype | None
    """None: a token's position is its index."""
    is_batched: bool
    """Whether tokens are those of several sequences."""
    has_cache_of_sequences: bool
    """Whether each sequence has a cache of its own."""
    has_sin_cache: bool
    """Whether sin is a tensor of its own, not the right half of the cache."""
    has_key: bool
    is_interleaved: bool
    alignment: int
    cache_alignment: int

    @staticmethod
    def of(
        rows: tuple[Tensor | None, ...],
        cos_sin_cache: Tensor,
        sin_cache: Tensor | None,
        positions: Tensor | None,
        has_key: bool,
        is_interleaved: bool,
    ) -> "RotarySource":
        """Describe tensors of heads, the first one not None, and the other arguments, which the op has checked."""
        return RotarySource(
            rows[0].dtype,
            cos_sin_cache.dtype,
            None if positions is None else positions.dtype,
            rows[0].ndim == 4,
            cos_sin_cache.ndim == 3,
            sin_cache is not None,
            has_key,
            is_interleaved,
            min(check.row_alignment(x) for x in rows if x is not None),
            min(check.row_alignment(x) for x in (cos_sin_cache, sin_cache) if x is not None),
        )


def check_heads(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    seqlen_offset: int,
    sin_cache: Tensor | None,
) -> int:
    """Check what is read; return the number of channels that turn."""
    *tokens, _, head_dim = check.tensor(
        "query", query, _DTYPES, (..., "num_tokens", "heads", "head_dim"), layout="rows"
    )
    if len(tokens) > 2:
        check.require(False, "query", "3 or 4 dimensions", query.ndim)
    device, heads = query.device, "key_heads"
    if key is not None:
        check.tensor("key", key, (query.dtype,), (*tokens, heads, head_dim), layout="rows", device=device)
    has_sequences = isinstance(cos_sin_cache, Tensor) and cos_sin_cache.ndim == 3 and len(tokens) == 2
    cache_shape = (tokens[0], "cache_rows", "rot") if has_sequences else ("cache_rows", "rot")
    found = check.tensor("cos_sin_cache", cos_sin_cache, _DTYPES, cache_shape, layout="rows", device=device)
    rot = found[-1]
    if sin_cache is not None:
        check.tensor("sin_cache", sin_cache, (cos_sin_cache.dtype,), tuple(found), layout="rows", device=device)
        rot *= 2
    columns = "8 to 256 columns, a multiple of 4" if sin_cache is not None else "16 to 512 columns, a multiple of 8"
    check.require(16 <= rot <= 512 and rot % 8 == 0, "cos_sin_cache", columns, found[-1])
    check.require(rot <= head_dim, "cos_sin_cache", "cos and sin for at most {} channels", rot, head_dim)
    if positions is not None:
        check.tensor("positions", positions, _POSITION_DTYPES, tuple(tokens), layout="rows", device=device)
    check.flag("interleaved", interleaved)
    check.integer("seqlen_offset", seqlen_offset)
    for name, x in (("query", query), ("key", key)):
        if x is not None:
            most = _MOST_ROWS * head_dim
            check.require(x.numel() <= most, name, "at most {} heads of tokens", x.numel(), _MOST_ROWS)
    if check.reads_data(query) and query.numel():
        name = "seqlen_offset" if positions is None else "positions"
        ends = (0, tokens[-1] - 1) if positions is None else positions.aminmax()
        ends = [int(end) + seqlen_offset for end in ends]
        check.require(ends[0] >= 0 and ends[1] < found[-2], name, "positions from 0 to {}", ends, found[-2] - 1)
    return rot


def check_outs(query: Tensor, key: Tensor | None, out: Tensor, key_out: Tensor | None) -> None:
    """Check tensors to write to: like query, and like key if there is one."""
    if (key is None) != (key_out is None):
        expected = "None without key" if key is None else "a tensor beside key and out"
        check.require(False, "key_out", expected, type(key_out).__name__)
    check.tensor("out", out, (query.dtype,), tuple(query.shape), layout="rows", device=query.device)
    if key is not None:
        check.tensor("key_out", key_out, (key.dtype,), tuple(key.shape), layout="rows", device=key.device)
