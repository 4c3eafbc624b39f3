"""batched_transpose_weight_sf in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def _packed_rows(exponents: Tensor, block_size: int) -> Tensor:
    """int32 (…, rows · block_size, ceil(cols / 4)) of the exponents (…, rows, cols) of each row's blocks."""
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)).unflatten(-1, (-1, 4))
    words = padded[..., 0] | padded[..., 1] << 8 | padded[..., 2] << 16 | padded[..., 3] << 24
    return words.repeat_interleave(block_size, -2)


def _col_major(x: Tensor) -> Tensor:
    *groups, rows, cols = x.shape
    return x.new_empty_strided(x.shape, (*[rows * cols] * len(groups), 1, rows)).copy_(x)


def write_weight_sf(sf: Sequence[Tensor], block_size: int, sf0s: Sequence[Tensor], sf1s: Sequence[Tensor]) -> None:
    """Write sf0 and sf1 of each weight, sf1 not transposed."""
    for x, sf0, sf1 in zip(sf, sf0s, sf1s, strict=True):
        exponents = x.view(torch.int32) >> 23 & 0xFF
        sf0.copy_(_packed_rows(exponents, block_size))
        sf1.copy_(_packed_rows(exponents.transpose(-1, -2), block_size))


def batched_transpose_weight_sf(
    sf: Sequence[Tensor], block_size: int, transpose_sf1s: Sequence[bool], outs: Sequence[Pair | None]
) -> list[Pair]:
    """See tk_quant.batched_transpose_weight_sf."""
    results = []
    for x, is_transposed, out in zip(sf, transpose_sf1s, outs, strict=True):
        if out is None:
            exponents = x.view(torch.int32) >> 23 & 0xFF
            sides = (_packed_rows(y, block_size) for y in (exponents, exponents.transpose(-1, -2)))
            sf0, sf1 = (_col_major(y) for y in sides)
            out = sf0, sf1.transpose(-1, -2) if is_transposed else sf1
        else:
            write_weight_sf([x], block_size, [out[0]], [out[1].transpose(-1, -2) if is_transposed else out[1]])
        results.append(tuple(out))
    return results
