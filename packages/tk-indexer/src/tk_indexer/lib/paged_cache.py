"""The paged cache of index keys: blocks of bytes, in each first the data of all its keys, then their 4-byte factors."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check

BLOCK_SIZES = (32, 64, 128)
"""Keys of a block."""
SF_BYTES = 4
"""Bytes of a key's factor, or factors."""


def bytes_of_key(dim: int, is_fp4: bool) -> int:
    """Bytes of a key's data."""
    return dim // 2 if is_fp4 else dim


def check_cache(name: str, cache: Any, key_bytes: int | str, device: torch.device | None) -> tuple[int, int, int]:
    """Check a cache uint8 (num_blocks, block_kv, W) or (num_blocks, block_kv, 1, W); return (num_blocks, block_kv, W).

    W is `key_bytes` if that is a number. Blocks may lie apart. Raises TypeError or ValueError.
    """
    middle = (1,) if isinstance(cache, Tensor) and cache.ndim == 4 else ()
    shape = ("num_blocks", "block_kv", *middle, key_bytes)
    num_blocks, block_kv, *_, width = check.tensor(name, cache, (torch.uint8,), shape, layout="rows", device=device)
    check.one_of(f"{name} (block_kv)", block_kv, BLOCK_SIZES)
    check.require(cache.stride(1) == width, name, "keys {} bytes apart", cache.stride(1), width)
    if num_blocks > 1:
        stride, least = cache.stride(0), block_kv * width
        is_apart = stride >= least and stride % 16 == 0
        check.require(is_apart, name, "blocks {} bytes apart, or more and a multiple of 16", stride, least)
    return num_blocks, block_kv, width


def block_bytes(cache: Tensor) -> Tensor:
    """The checked cache as uint8 (num_blocks, bytes of a block)."""
    num_blocks, block_kv, width = cache.shape[0], cache.shape[1], cache.shape[-1]
    num_bytes = block_kv * width
    # A single block may have any stride.
    return cache.as_strided((num_blocks, num_bytes), (cache.stride(0) if num_blocks > 1 else num_bytes, 1))
