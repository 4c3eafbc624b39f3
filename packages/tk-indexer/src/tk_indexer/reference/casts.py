"""References of the casts of index queries and keys, and of the gather from their paged cache."""

import torch
from torch import Tensor

from tk_core.reference.quantize import encode_e4m3, quantization_factors
from tk_core.scales import LIMITS

_ROPE_DIM = 64
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
    """Cast the transformed rows of k by `quantize_rows`, and write each to its slot, if it has one."""
    num_blocks, block_kv, dim = kv_cache.shape[0], kv_cache.shape[1], k.shape[1]
    x = transformed_rows(k, positions, cos_sin_cache, rope_first, is_neox, hadamard)
    data, sf = quantize_rows(x, scale_fmt == "ue8m0")
    is_slot = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_kv)
    slots = slot_mapping[is_slot]
    blocks, keys = slots // block_kv, slots % block_kv
    of_data, of_sf = parts_of_cache(kv_cache, dim)
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
) -> tuple[Tensor, Tensor]:
    """Cast the transformed heads by `quantize_rows`; multiply the weights, one factor after another."""
    data, sf = quantize_rows(transformed_rows(q, positions, cos_sin_cache, rope_first, is_neox, hadamard), True)
    products = weights.float() * sf
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


def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    """Copy each row's key from the cache, zeros from holes; rows of no sequence stay."""
    num_blocks, block_kv = kv_cache.shape[:2]
    (num_rows, key_bytes), (num_seqs, num_pages) = dst_k.shape, block_table.shape
    row = torch.arange(num_rows, device=dst_k.device, dtype=torch.int32)
    seq = torch.searchsorted(cu_seq_lens, row, right=True) - 1
    is_written = (seq >= 0) & (seq < num_seqs)
    row, seq = row[is_written], seq[is_written]
    index = row - cu_seq_lens[seq]
    page = index // block_kv
    is_key = page < num_pages
    blocks = torch.full_like(index, -1)
    blocks[is_key] = block_table[seq[is_key], page[is_key]]
    is_key = (blocks >= 0) & (blocks < num_blocks)
    for out, part in zip((dst_k, dst_scale), parts_of_cache(kv_cache, key_bytes)):
        found = torch.zeros((len(row), part.shape[-1]), dtype=torch.uint8, device=dst_k.device)
        found[is_key] = part[blocks[is_key], index[is_key] % block_kv]
        out.view(num_rows, part.shape[-1] // out.element_size()).view(torch.uint8)[row] = found
