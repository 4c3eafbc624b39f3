"""Operands for cases and tests: drawn at random, on any device, meta included."""

import torch

from tk_core.math import align, ceil_div

Pair = tuple[torch.Tensor, torch.Tensor]


def e4m3(*shape: int, device: str, positive: bool = False) -> torch.Tensor:
    """Random float8_e4m3fn from -448 to 448, or from 0 on if `positive`."""
    values = torch.randn(shape, device=device) * 100
    return (values.abs() if positive else values).clamp(-448, 448).to(torch.float8_e4m3fn)


def row_factors(num_rows: int, num_cols: int, device: str, layout: str = "column") -> torch.Tensor:
    """Factors (rows, cols): "column" major as casts write them, "row" major or "packed".

    Or sliced from more rows: "sliced" on 16 bytes, "off" beside them.
    """
    if layout == "packed":
        return packed_factors(num_rows, num_cols, device=device)
    if layout == "row":
        return torch.rand((num_rows, num_cols), device=device) + 0.5
    extra = {"sliced": 8, "off": 2}.get(layout, 0)
    whole = torch.empty_strided((num_rows + extra, num_cols), (1, align(num_rows + extra, 4)), device=device)
    whole.uniform_(0.5, 1.5)
    return whole[extra // 2 : extra // 2 + num_rows]


def activations(num_rows: int, num_channels: int, device: str, layout: str = "column", positive: bool = False) -> Pair:
    """A pair (M, K) with 1 × 128 blocks."""
    data = e4m3(num_rows, num_channels, device=device, positive=positive)
    return data, row_factors(num_rows, num_channels // 128, device, layout)


def packed_factors(*shape: int, device: str) -> torch.Tensor:
    """Random powers of two for blocks (..., R, C), four a word as Blackwell takes them: int32 (..., R, ⌈C/4⌉)."""
    *groups, num_rows, num_blocks = shape
    num_words, column = ceil_div(num_blocks, 4), align(num_rows, 4)
    codes = torch.randint(125, 130, (*groups, num_rows, num_words, 4), dtype=torch.uint8, device=device)
    strides = (num_words * column,) * len(groups) + (1, column)
    out = torch.empty_strided((*groups, num_rows, num_words), strides, dtype=torch.int32, device=device)
    return out.copy_(codes.view(torch.int32)[..., 0])


def weights(
    num_cols: int, num_channels: int, device: str, *groups: int, positive: bool = False, packed: bool = False
) -> Pair:
    """A pair (groups…, N, K) with 128 × 128 blocks."""
    data = e4m3(*groups, num_cols, num_channels, device=device, positive=positive)
    shape = (*groups, ceil_div(num_cols, 128), num_channels // 128)
    return data, packed_factors(*shape, device=device) if packed else torch.rand(shape, device=device) + 0.5


def bf16(*shape: int, device: str) -> torch.Tensor:
    """Random bfloat16."""
    return torch.randn(shape, device=device).bfloat16()


def ids(counts: tuple[int, ...], num_rows: int, device: str, alignment: int = 128) -> torch.Tensor:
    """grouped_layout int32 (num_rows) of groups with these counts."""
    out = []
    for group, count in enumerate(counts):
        out += [group] * count + [-1] * (align(count, alignment) - count)
    return torch.tensor((out + [-1] * num_rows)[:num_rows], dtype=torch.int32, device=device)


def psum(counts: tuple[int, ...], device: str, alignment: int = 128) -> torch.Tensor:
    """grouped_layout int32 (G) of the same groups: where each one's rows end."""
    out, first = [], 0
    for count in counts:
        out.append(first + count)
        first = align(first + count, alignment)
    return torch.tensor(out, dtype=torch.int32, device=device)


def dequantized(x: Pair) -> torch.Tensor:
    """The values of a pair, in float64; blocks are 1 × 128 if there are factors for each row, else 128 × 128."""
    data, sf = x
    factors = sf.double().repeat_interleave(128, dim=-1)
    if sf.shape[-2] != data.shape[-2]:
        factors = factors.repeat_interleave(128, dim=-2)[..., : data.shape[-2], :]
    return data.double() * factors
