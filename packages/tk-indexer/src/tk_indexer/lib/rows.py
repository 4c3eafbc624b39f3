"""What is done to a row of index queries or keys before it is cast: a rotation of 64 channels, a Hadamard transform."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tk_core import check

NUM_HEADS = (16, 32, 64)
"""Heads of a query."""
DIMS = (32, 64, 128)
"""Channels of a query's head, and of a key."""
FP4_DIMS = (64, 128)
"""The same in FP4."""
FP4_DTYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
"""Dtypes of tensors with two e2m1 codes a byte, the even channel in the low nibble."""
FP4_GROUP = 32
"""Channels that share a factor in FP4."""
ROPE_DIM = 64
"""Channels that a position rotates."""


@dataclass(frozen=True)
class Transform:
    """The steps on a row; part of a kernel's compile key."""

    table_dtype: torch.dtype | None
    """Dtype of cos_sin_cache; None without a rotation."""
    rope_first: bool
    """Whether the first 64 channels are rotated, else the last."""
    is_neox: bool
    """Whether channel i is paired with i + 32, else 2i with 2i + 1."""
    hadamard: bool

    @staticmethod
    def of(cos_sin_cache: Tensor | None, rope_first: bool, is_neox: bool, hadamard: bool) -> "Transform":
        """The steps that an op's arguments ask for; one that is equal where they are without effect."""
        if cos_sin_cache is None:
            return Transform(None, True, True, hadamard)
        return Transform(cos_sin_cache.dtype, rope_first, is_neox, hadamard)

    @property
    def in_bf16(self) -> bool:
        """Whether the row is rounded to bfloat16 before, and after each step."""
        return self.table_dtype is not None or self.hadamard


def check_rope(positions: Tensor | None, cos_sin_cache: Tensor | None, num_tokens: int, x: Tensor) -> None:
    """Check positions int64 (num_tokens) and their table (P, 64), for the rows of x; both may be None."""
    if positions is None or cos_sin_cache is None:
        name, given = ("cos_sin_cache", "positions") if positions is not None else ("positions", "cos_sin_cache")
        check.require(positions is cos_sin_cache, name, f"a tensor beside {given}", None)
        return
    dim = x.shape[-1]
    check.require(
        dim >= ROPE_DIM, "positions", "None for {} channels, fewer than the 64 that are rotated", "a tensor", dim
    )
    check.tensor("positions", positions, (torch.int64,), (num_tokens,), device=x.device)
    floats = torch.float32, torch.bfloat16
    num_positions, _ = check.tensor("cos_sin_cache", cos_sin_cache, floats, ("P", ROPE_DIM), device=x.device)
    check.require(num_positions > 0, "cos_sin_cache", "at least one row", num_positions)
    check.below("positions", positions, num_positions, "positions below {}")
