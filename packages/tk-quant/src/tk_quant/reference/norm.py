"""RMSNorm in plain PyTorch, with the roundings and the order of sums of the kernels."""

import math
from collections.abc import Sequence

import torch

from tk_core.math import align, ceil_div
from tk_core.reference.fma import fma
from tk_quant.norm.tile import PART_SEGMENTS, WARP, lanes_of, num_parts, row_tile
from tk_quant.reference.per_token import per_token_cast
from tk_quant.reference.quantizer import written


def sum_of_products(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ x · y over the last dimension, in the order of rows in `dtype` that tk_quant/norm/tile.py describes."""
    hidden = x.shape[-1]
    vec, lanes, pieces = lanes_of(hidden, dtype)
    missing = (0, lanes * pieces * vec - hidden)
    x, y = (torch.nn.functional.pad(each, missing).unflatten(-1, (pieces, lanes, vec)) for each in (x, y))
    total = torch.zeros_like(x[..., 0, :, 0], dtype=torch.float32)
    for piece in range(pieces):
        for j in range(vec):
            total = fma(x[..., piece, :, j], y[..., piece, :, j], total)
    width = min(lanes, WARP)
    total = total.unflatten(-1, (-1, width))
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width:]
    sums = torch.zeros_like(total[..., 0, 0])
    for warp in total[..., 0].unbind(-1):
        sums = sums + warp
    return sums


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    with_rstd: bool = False,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See tk_quant.norm_forward."""
    norm_input = x
    if residual is not None:
        norm_input = (x.float() + residual.float()).to(x.dtype).contiguous()
    values = norm_input.float()
    mean = sum_of_products(values, values, x.dtype) / torch.full((), x.shape[-1], dtype=torch.float32, device=x.device)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32).copy_(1 / (mean + torch.full_like(mean, eps)).sqrt())
    factor = torch.ones((), device=x.device) if weight is None else weight.float()
    factor = (factor + weight_offset if weight_offset else factor) * out_scale
    scaled = values * rstd.unsqueeze(-1)
    if round_before_weight:
        scaled = scaled.to(x.dtype).float()
    result = (scaled * factor).to(x.dtype).contiguous()
    if residual is not None:
        norm_input = written(residual_out, norm_input)
    return written(out, result), rstd if with_rstd else None, norm_input


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts, all of one shape and strides, one after the other in memory, a new first dimension."""
    one = parts[0]
    pitch = max(size * stride for size, stride in zip(one.shape, one.stride()))
    out = one.new_empty_strided((len(parts), *one.shape), (pitch, *one.stride()))
    for to, part in zip(out, parts):
        to.copy_(part)
    return out


def norm_forward_and_per_token_cast(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_bf16: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    mega_moe_sf: torch.Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
    *,
    use_swizzled_sf: bool = False,
    use_e4m3_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """See tk_quant.norm_forward_and_per_token_cast."""
    of_norm = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
    normed, rstd, norm_input = norm_forward(
        x, weight, eps, residual, out_scale, None, residual_out, with_rstd, **of_norm
    )
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    options = {"use_swizzled_sf": use_swizzled_sf, "tensor_sf": tensor_sf, "sf_clamp_min": sf_clamp_min}
    batches = x.shape[:-2]
    num_batches = math.prod(batches)
    matrices = normed.reshape(num_batches, *x.shape[-2:]) if num_batches else normed.new_empty((1, *x.shape[-2:]))
    pairs = [per_token_cast(rows, fmt, num_per_channels, None, *flags, **options) for rows in matrices]
    pair = tuple(_stacked(parts)[:num_batches].unflatten(0, batches) for parts in zip(*pairs)) if batches else pairs[0]
    if mega_moe_sf is not None:
        codes = per_token_cast(normed, fmt, 32, None, True, True, True, sf_clamp_min=sf_clamp_min)[1]
        token, block = torch.arange(len(x), device=x.device), align(mega_moe_block_m, 128)
        i = token % mega_moe_block_m
        rows = token // mega_moe_block_m * block + i // 128 * 128 + i % 32 * 4 + i % 128 // 32
        held = max(mega_moe_sf.shape[0], -(-len(x) // mega_moe_block_m) * block)
        mega_moe_sf.as_strided((held, mega_moe_sf.shape[1]), mega_moe_sf.stride())[rows] = codes
    if with_out_bf16 or out_bf16 is not None:
        out_bf16 = written(out_bf16, normed.bfloat16())
    return written(out, pair), out_bf16, rstd, norm_input


def _weight_parts(normed: torch.Tensor, grads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(parts, H): Σ normed · grads over the rows of each part, rows and parts as tk_quant/norm/backward.py has them."""
    num_rows, hidden = normed.shape
    ranges_of_part, parts = row_tile(hidden, dtype).blocks_down, num_parts(num_rows, hidden, dtype)
    length, longer = divmod(num_rows, parts * ranges_of_part)
    index = torch.arange(parts * ranges_of_part, device=normed.device)
    total = torch.zeros(len(index), hidden, device=normed.device)
    for step in range(length + (longer > 0)):
        is_row = (step < length + (index < longer).int()).unsqueeze(1)
        row = (index * length + index.clamp(max=longer) + step).clamp(max=num_rows - 1)
        total = fma(normed[row].where(is_row, 0), grads[row].where(is_row, 0), total)
    sums = total.new_zeros(parts, hidden)
    for of_range in total.view(parts, ranges_of_part, hidden).unbind(1):
        sums = sums + of_range
    return sums


def _sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    """Σ over the first dimension in float64: the parts of each segment, then the segments."""
    length = ceil_div(len(parts), PART_SEGMENTS)
    padded = torch.nn.functional.pad(parts.double(), (0, 0, 0, length * PART_SEGMENTS - len(parts)))
    sums = torch.zeros_like(padded[:PART_SEGMENTS])
    for each in padded.view(PART_SEGMENTS, length, -1).unbind(1):
        sums = sums + each
    total = torch.zeros_like(sums[0])
    for each in sums:
        total = total + each
    return total


def norm_backward(
    out_grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    residual_out_grad: torch.Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See tk_quant.norm_backward."""
    hidden, factor = x.shape[-1], rstd.unsqueeze(-1)
    normed, grads = x.float() * factor, out_grad.float() * out_scale
    weights = torch.ones((), device=x.device) if weight is None else weight.float()
    scaled = grads * (weights + weight_offset if weight_offset else weights)
    mean = sum_of_products(normed, scaled, x.dtype) / torch.full_like(rstd, hidden)
    x_grad = (scaled - normed * mean.unsqueeze(-1)) * factor
    if residual_out_grad is not None:
        x_grad = x_grad + residual_out_grad.float()
    x_grad = x.new_empty(x.shape).copy_(x_grad)
    if weight is None:
        return x_grad, None
    total = torch.zeros_like(weight, dtype=torch.float64)
    if x.numel():
        # (rows of one weight, weights, H)
        shape = (-1, *(weight.shape if weight.ndim == 2 else (1, hidden)))
        normed, grads = normed.reshape(shape), grads.reshape(shape)
        parts = [_weight_parts(normed[:, g], grads[:, g], x.dtype) for g in range(shape[1])]
        total = torch.stack([_sum_of_parts(each) for each in parts]).view(weight.shape)
    if weight_grad is None:
        return x_grad, total.float().to(weight.dtype)
    return x_grad, weight_grad.copy_((total + weight_grad.double()).float()) if x.numel() else weight_grad
