"""cast_back: dequantize, out = data * sf of its block.

x is a pair: data e4m3 (num_tokens, hidden) or e2m1 (num_tokens, hidden / 2), and one sf for each block of
x_block_size = (tokens, channels), in any layout; blocks at the edges may be smaller. The product is rounded to float32
and, for bf16, rounded once more. per_token_cast_back is the same with blocks of one token.

It is all memory traffic, most of it stores. So a thread takes as many neighbouring channels as 16 bytes of the output
hold (or a multiple), from `pieces` rows at once so that enough loads are in flight; each store of a warp then writes
512 bytes in a row:

              lanes x vec channels            e.g. e4m3 to float32, vec 4: a warp loads 128 bytes and stores 512
            ┌────┬────┬────┬─   ─┬────┐
     rows × │ t0 │ t1 │ t2 │  …  │    │       pieces of a thread lie `rows` rows apart
     pieces ├────┼────┼────┼─   ─┼────┤
            │    │    │    │  …  │    │
            └────┴────┴────┴─   ─┴────┘
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import check_scales

_OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_FLOAT4_DTYPE = getattr(torch, "float4_e2m1fn_x2", None)
_PAIR_DTYPES = (torch.float8_e4m3fn, torch.int8) + ((_FLOAT4_DTYPE,) if _FLOAT4_DTYPE is not None else ())
_BLOCK_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)

_E2M1_BY_INSTRUCTION = r"""
#include <cuda_fp4.h>

// Four e2m1 codes in the lower half of `codes`, the first in the lowest nibble, to float32.
__device__ __forceinline__ void tk_floats_of_e2m1x4(unsigned codes, float *values) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2_raw pair = __nv_cvt_fp4x2_to_halfraw2(__nv_fp4x2_storage_t(codes >> (8 * i)), __NV_E2M1);
    const float2 pair_values = __half22float2(__half2(pair));
    values[2 * i] = pair_values.x;
    values[2 * i + 1] = pair_values.y;
  }
}
"""

_E2M1_BY_ARITHMETIC = r"""
#include <cuda_fp16.h>

// Four bytes of low (0 to 3) and high (4 to 7), chosen by the nibbles of the selector's lower half. With its top bit
// set a nibble gives eight copies of the chosen byte's top bit instead, which __byte_perm does not promise.
__device__ __forceinline__ unsigned tk_prmt(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// Four e2m1 codes in the lower half of `codes`, the first in the lowest nibble, to float32.
__device__ __forceinline__ void tk_floats_of_e2m1x4(unsigned codes, float *values) {
  // Upper bytes of 0, .5, 1, 1.5, 2, 3, 4, 6 in float16; their lower bytes are 0.
  const unsigned magnitudes = tk_prmt(0x3e3c3800u, 0x46444240u, codes & 0x7777u);
  // 0x80 for a positive code and 0xff for a negative one: bit 6 is the sign.
  const unsigned signs = tk_prmt(0x80808080u, 0x80808080u, codes) << 1;
  const unsigned upper = magnitudes | (signs & 0x80808080u);
  const unsigned pairs[2] = {tk_prmt(upper, 0u, 0x1404u), tk_prmt(upper, 0u, 0x3424u)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair_values = __half22float2(*reinterpret_cast<const __half2 *>(&pairs[i]));
    values[2 * i] = pair_values.x;
    values[2 * i + 1] = pair_values.y;
  }
}
"""

LOAD_16_BITS = r"""
// Like TileLang's loads of 32 bits and more; unspecified where not valid.
__device__ __forceinline__ unsigned tk_load_16_bits(const void *address, bool valid) {
  unsigned short loaded = 0;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %2, 0;\n"
      "  @p ld.global.u16 %0, [%1];\n"
      "}\n"
      : "+h"(loaded)
      : "l"(address), "r"(int(valid)));
  return loaded;
}
"""
"""uint32 tk_load_16_bits(pointer, bool)."""

_UE8M0 = r"""
// Byte `index` of a word as the exponent of a power of two: 0 is 2^-127, 255 is NaN.
__device__ __forceinline__ float tk_float_of_ue8m0(unsigned word, int index) {
  const unsigned bits = __byte_perm(word, 0u, 0x0444u | unsigned(index) << 12) >> 1;
  // 2^-127 is subnormal, so its exponent field would say 0; 255 would say infinity, but infinity * 0 is NaN.
  const float power = fmaxf(__uint_as_float(bits), 0x1p-127f);
  return __fmaf_rn(power, 0.0f, power);
}
"""


def e2m1_decode_source(arch: Arch) -> str:
    """CUDA source of `void tk_floats_of_e2m1x4(uint32, float *)`."""
    return _E2M1_BY_INSTRUCTION if arch.has_fp4_convert else _E2M1_BY_ARITHMETIC


@dataclass(frozen=True, eq=False)
class CastBackConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels of a piece, which one thread takes at once: 16 bytes of the output, or a multiple."""
    pieces: int
    """Rows that a thread takes a piece of."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Threads above each other."""

    @staticmethod
    @cache
    def best(hidden: int, out_itemsize: int, narrow_blocks: bool, arch: Arch) -> "CastBackConfig":
        """The configuration for a width, an output type, and blocks narrower than a piece or not."""
        # Untuned. Narrow blocks need a sf for each channel, so more rows share them.
        vec = 16 // out_itemsize
        pieces = 8 if narrow_blocks else 4
        num_lanes = hidden // vec
        if num_lanes <= 128:
            # Whole warps, and a power of two, so that the rows of a tile lie in one block where blocks have many rows.
            rows = 32 // gcd(num_lanes, 32)
            while num_lanes * rows < 128:
                rows *= 2
            return CastBackConfig(vec, pieces, num_lanes, rows)
        least = ceil_div(num_lanes, 256)
        for col_tiles in range(least, 2 * least + 1):
            if num_lanes % (32 * col_tiles) == 0:
                return CastBackConfig(vec, pieces, num_lanes // col_tiles, 1)
        return CastBackConfig(vec, pieces, 32 * ceil_div(num_lanes, 32 * least), 1)


def _narrow(x_block_channels: int, hidden: int, vec: int) -> bool:
    """Whether a piece may need several scale factors."""
    return x_block_channels % vec != 0 and x_block_channels < hidden


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _cast_back_kernel(
    x_dtype: torch.dtype,
    alignment: int,
    x_block_size: tuple[int, int],
    packed: bool,
    hidden: int,
    out_dtype: torch.dtype,
    config: CastBackConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    vec, pieces, lanes, rows = config.vec, config.pieces, config.lanes, config.rows
    block_tokens, block_channels = x_block_size
    is_e2m1 = x_dtype is torch.int8
    x_per_byte = 2 if is_e2m1 else 1
    x_bytes = vec // x_per_byte
    x_words = ceil_div(x_bytes, 4)
    x_element = "int8" if is_e2m1 else "float8_e4m3fn"
    out_element = T.dtype(out_dtype)
    out_words = vec * out_dtype.itemsize // 4
    threads = lanes * rows
    tile_rows = rows * pieces
    col_tiles = ceil_div(hidden, lanes * vec)
    sf_cols = ceil_div(hidden, block_channels)
    sf_per_piece = vec if _narrow(block_channels, hidden, vec) else 1
    # Where a tile lies in one row of blocks, the pieces of a thread have their scale factors in common.
    sf_pieces = 1 if block_tokens % tile_rows == 0 else pieces
    source = (e2m1_decode_source(arch) + LOAD_16_BITS if is_e2m1 else "") + (_UE8M0 if packed else "")
    assert threads % 32 == 0
    assert hidden % vec == 0
    assert out_words % 4 == 0

    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride")
    sf_rows, sf_row_stride, sf_col_stride = T.dynamic("sf_rows"), T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
    x_type = T.StridedTensor((num_tokens, hidden // x_per_byte), (x_stride, 1), x_element)
    sf_type = T.StridedTensor(
        (sf_rows, ceil_div(sf_cols, 4) if packed else sf_cols),
        (sf_row_stride, sf_col_stride),
        "int32" if packed else "float32",
    )

    @T.macro
    def load_piece(x: T.Buffer, words: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        x_col = col // x_per_byte
        if alignment < min(x_bytes, 16):
            elements = T.view(words, (pieces, x_words * 4), x_element)
            if valid:
                for j in T.unroll(x_bytes):
                    elements[piece, j] = x[row, x_col + j]
        elif x_bytes == 2:
            words[piece, 0] = T.call_extern("uint32", "tk_load_16_bits", T.address_of(x[row, x_col]), valid)
        elif x_bytes == 4:
            words[piece, 0] = T.ldg32(x[row, x_col], pred=valid)
        elif x_bytes == 8:
            words[piece, 0:2] = T.ldg64(x[row, x_col], pred=valid)
        else:
            for j in T.unroll(x_words // 4):
                words[piece, 4 * j : 4 * j + 4] = T.ldg128(x[row, x_col + 16 * j], pred=valid)

    @T.macro
    def load_sf(x_sf: T.Buffer, sf: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        for j in T.unroll(sf_per_piece):
            sf_row, sf_col = row // block_tokens, (col + j) // block_channels
            if packed:
                word = T.ldg32(x_sf[sf_row, sf_col // 4], pred=valid)
                sf[piece, j] = T.call_extern("float32", "tk_float_of_ue8m0", word, sf_col % 4)
            else:
                sf[piece, j] = T.reinterpret(T.ldg32(x_sf[sf_row, sf_col], pred=valid), "float32")

    @T.macro
    def store_piece(
        words: T.Buffer, sf: T.Buffer, out: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool
    ) -> None:
        values = T.alloc_local((vec,), "float32")
        rounded = T.alloc_local((vec,), out_element)
        if is_e2m1:
            for j in T.unroll(vec // 4):
                codes = words[piece, j // 2] if j % 2 == 0 else words[piece, j // 2] >> T.uint32(16)
                T.call_extern("void", "tk_floats_of_e2m1x4", codes, T.address_of(values[4 * j]))
        else:
            elements = T.view(words, (pieces, vec), x_element)
            for j in T.vectorized(vec):
                values[j] = T.cast(elements[piece, j], "float32")
        for j in T.unroll(vec):
            values[j] = values[j] * sf[piece % sf_pieces, j % sf_per_piece]
        for j in T.vectorized(vec):
            rounded[j] = T.cast(values[j], out_element)
        rounded_words = T.view(rounded, (out_words,), "uint32")
        for j in T.unroll(out_words // 4):
            T.stg128(out[row, col + j * (vec * 4 // out_words)], rounded_words[4 * j : 4 * j + 4], pred=valid)

    @T.prim_func
    def cast_back(x: x_type, x_sf: sf_type, out: T.Tensor((num_tokens, hidden), out_element)) -> None:
        with T.Kernel(T.ceildiv(num_tokens, tile_rows) * col_tiles, threads=threads) as block:
            if is_e2m1 or packed:
                T.import_source(source)
            thread = T.get_thread_binding()
            first_row = (block // col_tiles) * tile_rows + thread // lanes
            col = ((block % col_tiles) * lanes + thread % lanes) * vec
            inside = col < hidden
            words = T.alloc_local((pieces, x_words), "uint32")
            sf = T.alloc_local((sf_pieces, sf_per_piece), "float32")
            for i in T.unroll(pieces):
                load_piece(x, words, i, first_row + i * rows, col, inside and first_row + i * rows < num_tokens)
            for i in T.unroll(sf_pieces):
                load_sf(x_sf, sf, i, first_row + i * rows, col, inside and first_row + i * rows < num_tokens)
            for i in T.unroll(pieces):
                store_piece(words, sf, out, i, first_row + i * rows, col, inside and first_row + i * rows < num_tokens)

    return cast_back


def _cast_back_reference(
    x: torch.Tensor, x_sf: torch.Tensor, out: torch.Tensor, x_block_tokens: int, x_block_channels: int
) -> None:
    from tk_quant.reference.cast_back import cast_back

    fmt = "bf16" if out.dtype is torch.bfloat16 else "fp32"
    out.copy_(cast_back((x, x_sf), fmt, (x_block_tokens, x_block_channels)))


@op("tk_quant::cast_back_out", mutates=("out",), reference=_cast_back_reference)
def _cast_back_out(
    x: torch.Tensor, x_sf: torch.Tensor, out: torch.Tensor, x_block_tokens: int, x_block_channels: int
) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    hidden, out_dtype = out.shape[1], out.dtype
    itemsize = out_dtype.itemsize
    config = CastBackConfig.best(hidden, itemsize, _narrow(x_block_channels, hidden, 16 // itemsize), arch)
    _cast_back_kernel(
        x.dtype,
        check.row_alignment(x),
        (x_block_tokens, x_block_channels),
        x_sf.dtype is torch.int32,
        hidden,
        out_dtype,
        config,
        arch,
    )(x, x_sf, out)


def check_pair(
    x: tuple[torch.Tensor, torch.Tensor], fmt: str, x_special_fmt: str | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Check what does not depend on blocks: `(data, sf, hidden)`, the data of e2m1 as int8; sf is not looked at."""
    if fmt not in _OUT_DTYPES:
        check.one_of("fmt", fmt, tuple(_OUT_DTYPES))
    if x_special_fmt is not None:
        check.one_of("x_special_fmt", x_special_fmt, (None,))
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        check.require_type(isinstance(x, (tuple, list)), "x", "a pair (data, sf)", type(x).__name__)
        check.require(False, "x", "a pair (data, sf)", f"{len(x)} items")
    data, sf = x
    hidden = check.tensor("x[0]", data, _PAIR_DTYPES, ("num_tokens", "hidden"), layout="rows")[1]
    if data.dtype is not torch.float8_e4m3fn:
        hidden *= 2
        if data.dtype is not torch.int8:
            data = data.view(torch.int8)
    if hidden <= 0 or hidden % 64:
        check.require(False, "x", "a positive multiple of 64 channels", hidden)
    return data, sf, hidden


def dequantize(
    data: torch.Tensor, sf: torch.Tensor, hidden: int, fmt: str, x_block_size: tuple[int, int]
) -> torch.Tensor:
    """The rest of the check, the allocation and the launch; blocks have positive sides."""
    num_tokens = data.shape[0]
    block_tokens, block_channels = x_block_size
    check_scales("x[1]", sf, ceil_div(num_tokens, block_tokens), ceil_div(hidden, block_channels), data.device)
    out = data.new_empty((num_tokens, hidden), dtype=_OUT_DTYPES[fmt])
    _cast_back_out(data, sf, out, block_tokens, block_channels)
    return out


@replayable
def cast_back(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
) -> torch.Tensor:
    """Dequantize: data * sf of its block, rounded to float32, and that to bfloat16 where `fmt` is "bf16".

    Both roundings are to nearest, ties to even, subnormals included. Data or sf that is NaN, and infinity times 0, give
    NaN, always with the bits 0x7fffffff (bf16: 0x7fff). Names and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: `(data, sf)`. data: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), the even channel in the low nibble; hidden a multiple of 64, rows may be strided. sf: one for
            each block, (ceil(num_tokens / block tokens), ceil(hidden / block channels)), in any layout of
            tk_core.scales: float32 row major or TMA-aligned column major, or packed UE8M0.
        fmt: Type of the output, "bf16" or "fp32".
        x_block_size: (tokens, channels) of a block: (1, any number), or two powers of two up to 128, such as (128, 1),
            (32, 32) and (128, 128).
        x_special_fmt: None, for e4m3 and e2m1 data. No special format is supported yet.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data or sf has another dtype, or x_block_size is no pair of ints.
        ValueError: Any other argument is not as described, or is on another device.
    """
    data, sf, hidden = check_pair(x, fmt, x_special_fmt)
    check.require_type(isinstance(x_block_size, (tuple, list)), "x_block_size", "a tuple of two", x_block_size)
    check.require(len(x_block_size) == 2, "x_block_size", "two numbers", x_block_size)
    for size in x_block_size:
        check.integer("x_block_size", size)
    block_tokens, block_channels = x_block_size
    if block_tokens != 1 or block_channels < 1:
        check.require(
            block_tokens in _BLOCK_SIDES and block_channels in _BLOCK_SIDES,
            "x_block_size",
            "(1, channels), or two powers of two up to 128",
            x_block_size,
        )
    return dequantize(data, sf, hidden, fmt, (block_tokens, block_channels))
