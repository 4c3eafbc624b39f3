"""References of the casts of index queries and keys, and of the gather from their paged cache."""

import torch
from torch import Tensor

from tk_core.reference.quantize import decode_e2m1, encode_e2m1, encode_e4m3, quantization_factors
from tk_core.reference.scales import decode_ue8m0
from tk_core.scales import LIMITS

_ROPE_DIM = 64
_FP4_GROUP = 32
_LOG2_OF_ROOM = 6
"""Between e2m1 and e4m3: 6 · 2⁶ = 384."""
_NAN_BITS = 0x7FFFFFFF


def indexer_k_quant_and_cache(
    k: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    *,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    rope_first: bool = True,
    is_neox: bool = True,
    hadamard: bool = False,
) -> None:
    """Cast the transformed rows of k, and write each to its slot, if it has one."""
    num_blocks, block_kv, dim = kv_cache.shape[0], kv_cache.shape[1], k.shape[1]
    x = transformed_rows(k, positions, cos_sin_cache, rope_first, is_neox, hadamard)
    is_fp4 = quant_block_size < dim
    data, sf = quantize_rows_to_fp4(x) if is_fp4 else quantize_rows(x, scale_fmt == "ue8m0")
    is_slot = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_kv)
    slots = slot_mapping[is_slot]
    blocks, keys = slots // block_kv, slots % block_kv
    of_data, of_sf = parts_of_cache(kv_cache, data.shape[1])
    of_data[blocks, keys] = data.view(torch.uint8)[is_slot]
    of_sf[blocks, keys] = sf[:, None].view(torch.uint8)[is_slot]


def fused_indexer_q_rope_quant(
    positions: Tensor | None,
    q: Tensor,
    cos_sin_cache: Tensor | None,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool = True,
    *,
    fmt: str = "e4m3",
    rope_first: bool = True,
    hadamard: bool = False,
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """Cast the transformed heads; multiply the weights, one factor after another."""
    x = transformed_rows(q, positions, cos_sin_cache, rope_first, is_neox, hadamard)
    products = weights.float()
    if fmt == "e2m1":
        data = quantize_rows_to_fp4(x)
    else:
        data, sf = quantize_rows(x, True)
        products = products * sf
    for factor in (softmax_scale, head_scale):
        products = products * torch.full((), factor, dtype=torch.float32, device=q.device)
    return data, products


def parts_of_cache(kv_cache: Tensor, key_bytes: int) -> tuple[Tensor, Tensor]:
    """Views of a cache (num_blocks, block_kv, ...): data (num_blocks, block_kv, key_bytes), sf (..., 4), both uint8."""
    num_blocks, block_kv = kv_cache.shape[:2]
    stride, first = kv_cache.stride(0), kv_cache.storage_offset()
    return tuple(
        kv_cache.as_strided((num_blocks, block_kv, size), (stride, size, 1), first + skipped)
        for size, skipped in ((key_bytes, 0), (4, block_kv * key_bytes))
    )


def transformed_rows(
    x: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    rope_first: bool,
    is_neox: bool,
    hadamard: bool,
) -> Tensor:
    """Rows (T, ..., D), rotated by their positions (T) and transformed, rounded to bfloat16 on the way; as float32."""
    if positions is None and not hadamard:
        return x.float()
    x = x.to(torch.bfloat16).float()
    if positions is not None:
        first = 0 if rope_first else x.shape[-1] - _ROPE_DIM
        angles = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)].float()
        cos, sin = angles.view(len(x), *(1,) * (x.ndim - 2), 2, _ROPE_DIM // 2).unbind(-2)
        rotated = x[..., first : first + _ROPE_DIM]
        # (..., 2, 32): the two channels of each pair
        pairs = rotated.unflatten(-1, (2, 32)) if is_neox else rotated.unflatten(-1, (32, 2)).transpose(-1, -2)
        x0, x1 = pairs.unbind(-2)
        pairs = torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), dim=-2)
        rotated = (pairs if is_neox else pairs.transpose(-1, -2)).flatten(-2)
        x = torch.cat((x[..., :first], rotated, x[..., first + _ROPE_DIM :]), dim=-1)
        x = x.to(torch.bfloat16).float()
    return hadamard_transform(x) if hadamard else x


def hadamard_transform(x: Tensor) -> Tensor:
    """H x · float32(D^-½), float32 (..., D), rounded to bfloat16: butterflies of strides 1, 2, 4, … up to D / 2."""
    dim, stride = x.shape[-1], 1
    while stride < dim:
        low, high = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    return (x * torch.full((), dim**-0.5, dtype=torch.float32, device=x.device)).to(torch.bfloat16).float()


def quantize_rows(x: Tensor, round_sf: bool) -> tuple[Tensor, Tensor]:
    """`(data, sf)` of float32 rows (..., D): float8_e4m3fn (..., D) and float32 (...); the sf of NaN is 0x7fffffff."""
    sf, factor = quantization_factors(x.abs().amax(dim=-1), "e4m3", round_sf, LIMITS["e4m3"][1])
    nan = torch.full((), _NAN_BITS, dtype=torch.int32, device=x.device).view(torch.float32)
    return encode_e4m3(x * factor[..., None]), torch.where(sf.isnan(), nan, sf)


def quantize_rows_to_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """`(data, sf)` of float32 rows (..., D): e2m1, int8 (..., D / 2), and UE8M0 of 32 channels each, int32 (...)."""
    groups = x.unflatten(-1, (-1, _FP4_GROUP))
    sf, factor = quantization_factors(groups.abs().amax(dim=-1), "e2m1", True, LIMITS["e2m1"][1])
    exponents = ((sf.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, 4 - exponents.shape[-1]))
    return encode_e2m1((groups * factor[..., None]).flatten(-2)), exponents.view(torch.int32)[..., 0]


def widen_rows(data: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 (..., D / 2) and UE8M0 int32 (...) to e4m3 (..., D) and float32 (...): row factors, values unchanged.

    A row's factor has the biased exponent max(E - 6, 1), E that of its largest group. Values of groups whose factor is
    more than 2¹⁴ below are rounded.
    """
    exponents = sf[..., None].view(torch.uint8)[..., : 2 * data.shape[-1] // _FP4_GROUP].int()
    largest = exponents.amax(dim=-1, keepdim=True)
    of_row = (largest - _LOG2_OF_ROOM).clamp(min=1)
    # 2⁻¹²⁶ already rounds every code to zero.
    powers = (((exponents - of_row).clamp(min=-126) + 127) << 23).view(torch.float32)
    values = decode_e2m1(data).unflatten(-1, (-1, _FP4_GROUP)) * powers[..., None]
    return encode_e4m3(values.flatten(-2)), decode_ue8m0(torch.where(largest == 255, 255, of_row))[..., 0]


def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Copy each row's key from the cache, or widen it; zeros from holes; rows of no sequence stay."""
    num_blocks, block_kv = kv_cache.shape[:2]
    num_rows, num_pages = dst_k.shape[0], block_table.shape[1]
    row = torch.arange(num_rows, device=dst_k.device, dtype=torch.int32)
    seq = torch.searchsorted(cu_seq_lens, row, right=True) - 1
    is_written = (seq >= 0) & (seq < len(block_table))
    row, seq = row[is_written], seq[is_written]
    index = row - cu_seq_lens[seq]
    page = index // block_kv
    is_key = page < num_pages
    blocks = torch.full_like(index, -1)
    blocks[is_key] = block_table[seq[is_key], page[is_key]]
    is_key = (blocks >= 0) & (blocks < num_blocks)
    data, sf = (
        part[blocks[is_key], index[is_key] % block_kv] for part in parts_of_cache(kv_cache, kv_cache.shape[-1] - 4)
    )
    if dst_k.shape[1] * dst_k.element_size() > data.shape[1]:
        data, sf = widen_rows(data, sf.view(torch.int32)[:, 0])
        sf = sf[:, None]
    for out, part in zip((dst_k, dst_scale), (data, sf)):
        part = part.view(torch.uint8)
        found = torch.zeros((len(row), part.shape[1]), dtype=torch.uint8, device=dst_k.device)
        found[is_key] = part
        out.view(num_rows, part.shape[1] // out.element_size()).view(torch.uint8)[row] = found
