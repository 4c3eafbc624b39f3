"""cast_back, and its relatives for e5m6 and for blocks of one token: dequantize, out = data * sf of its block.

The kernel is bound by memory, mostly by stores. A vector is as many neighbouring channels as fit in 16 bytes of the
output, so each store of a warp writes 512 contiguous bytes. The vectors of a tile go to its threads in turn:

                   block_channels            e.g. e4m3 to float32, vectors of 4: a warp loads 128 bytes and stores 512
             ┌────┬────┬────┬─   ─┬────┐
       block │ t0 │ t1 │ t2 │  …  │    │
       rows  ├────┼────┼────┼─   ─┼────┤     a thread's loads are all in flight before it needs the first
             │ t0 │ t1 │ t2 │  …  │    │
             └────┴────┴────┴─   ─┴────┘

TileLang converts e2m1 to e4m3 and that to float32, four codes at a time; e5m6 is loaded as words (e5m6.py).
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, check_scales
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import aligned
from tk_quant.cast.config import CastInput
from tk_quant.cast.format import BLOCK_SIDES, E2M1_DTYPES, OUT_DTYPES, block_size_of, pair_of

_GROUPS = (16, 32, 64, 128)
_BYTE_SF_DTYPES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)

# Without enable_lower_ldgstg nvcc splits some of the vector stores.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.enable_lower_ldgstg": True}


def _tile(hidden: int, x_bits: int, vector: int) -> tuple[int, int, int]:
    """(rows, channels, threads) of a thread block's tile; channels past hidden are skipped.

    Up to 256 threads along a row, each with a vector in two or four rows; narrow tensors get more rows.
    H200, 8192 x 7168, with an earlier kernel that had the same tiles. For vectors of up to 4 bytes of codes, two a
    thread: e4m3 to fp32 72.6 µs, e2m1 to fp32 68.7; four a thread: 75.1 and 69.4. For vectors of 8 bytes, e4m3 to
    bf16: four 44.4, two 45.2. A thread with two adjacent vectors, 32 bytes of fp32: 112 and more.
    """
    rows_per_thread = 2 if vector * x_bits <= 32 else 4
    num_vectors = hidden // vector
    if num_vectors <= 128:
        # Whole warps, and a power of two of rows, so that they lie in one block where blocks have many rows.
        rows = 32 // gcd(num_vectors, 32)
        while num_vectors * rows < 128:
            rows *= 2
        return rows * rows_per_thread, hidden, num_vectors * rows
    least = ceil_div(num_vectors, 256)
    # If a row has a power of two of tiles, no thread needs an integer division.
    counts = sorted(range(least, 2 * least + 1), key=lambda count: (count & (count - 1) != 0, count))
    threads = next((num_vectors // count for count in counts if num_vectors % (32 * count) == 0), None)
    if threads is None:
        threads = 32 * ceil_div(num_vectors, 32 * least)
    return rows_per_thread, threads * vector, threads


@kernel(pass_configs=_PASS_CONFIGS)
def _cast_back_kernel(quantized: CastInput, hidden: int, out_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_quant.cast.e5m6 import decode_e5m6, load_e5m6, words_of_vector
    from tk_quant.cast.scales import float_of_ue8m0, sf_bytes, sf_index, sf_type

    vector = 16 // out_dtype.itemsize
    block_rows, block_channels, threads = _tile(hidden, quantized.bits, vector)
    num_tiles = ceil_div(hidden, block_channels)
    vectors, num_words = block_channels // vector, words_of_vector(vector)
    dtype, alignment, layout, is_nvfp4 = quantized.dtype, quantized.alignment, quantized.layout, quantized.is_nvfp4
    is_e4m3 = is_nvfp4 or quantized.has_e4m3_sf
    # Rows and channels of a tile that are known at compile time to share one scale factor.
    block_tokens, channels_of_sf = quantized.block_size
    sf_rows = block_rows if block_tokens % block_rows == 0 else 1
    sf_channels = vector if channels_of_sf % vector == 0 or channels_of_sf >= hidden else 1
    sf_dtype = "float8_e4m3fn" if is_e4m3 else "float8_e8m0fnu"
    has_exponents = not is_e4m3 and layout is not ScaleLayout.COL_MAJOR
    sf_code_dtype = "uint8" if has_exponents else sf_dtype if is_e4m3 else "float32"
    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride", "int64")

    def of_channel(row: Any, channel: Any) -> tuple[Any, Any]:
        index = (row * block_channels + channel) // vector
        return index % threads, index // threads * vector + channel % vector

    def of_word(row: Any, column: Any, word: Any) -> tuple[Any, Any]:
        index = row * vectors + column
        return index % threads, index // threads * num_words + word

    @T.macro
    def load_values(x: T.Buffer, values: T.Buffer, token: T.int32, channel: T.int32) -> None:
        """Load a tile's codes and decode them to float32."""
        e4m3 = T.alloc_fragment(values.shape, "float8_e4m3fn")
        T.annotate_layout({e4m3: T.Fragment(values.shape, forward_fn=of_channel)})
        if dtype is torch.uint8:
            words = T.alloc_fragment((block_rows, vectors, num_words), "uint32")
            T.annotate_layout({words: T.Fragment(words.shape, forward_fn=of_word)})
            load_e5m6(x, words, token, channel // vector, alignment)
            decode_e5m6(words, values, channel // vector)
        elif dtype is torch.int8:
            e2m1 = T.alloc_fragment(values.shape, "float4_e2m1fn")
            T.annotate_layout({e2m1: T.Fragment(values.shape, forward_fn=of_channel)})
            codes = T.view(x, (num_tokens, hidden), "float4_e2m1fn", strides=(2 * x_stride, 1))
            T.copy(codes[token : token + block_rows, channel : channel + block_channels], e2m1)
            T.copy(e2m1, e4m3)
            T.copy(e4m3, values)
        elif alignment >= 4:
            T.copy(x[token : token + block_rows, channel : channel + block_channels], e4m3)
            T.copy(e4m3, values)
        else:  # words assembled from bytes would go through local memory
            T.copy(x[token : token + block_rows, channel : channel + block_channels], values)

    @T.macro
    def load_sf(x_sf: T.Buffer, sf: T.Buffer, token: T.int32, channel: T.int32) -> None:
        """Load the scale factors of a tile's blocks and decode them to float32."""
        if quantized.has_e4m3_sf:
            # Widened at once: codes that are widened in pairs would go through local memory.
            for i, j in T.Parallel(*sf.shape):
                row, col = (token + i * sf_rows) // block_tokens, (channel + j * sf_channels) // channels_of_sf
                sf[i, j] = T.cast(x_sf[sf_index(row, col, layout)], "float32")
        else:
            codes = T.alloc_fragment(sf.shape, sf_code_dtype)
            stored = x_sf if is_e4m3 else sf_bytes(x_sf, layout)
            for i, j in T.Parallel(*sf.shape):
                row, col = (token + i * sf_rows) // block_tokens, (channel + j * sf_channels) // channels_of_sf
                codes[i, j] = stored[sf_index(row, col, layout)]
            for i, j in T.Parallel(*sf.shape):
                sf[i, j] = float_of_ue8m0(codes[i, j]) if has_exponents else T.cast(codes[i, j], "float32")

    @T.prim_func
    def cast_back(
        x: T.StridedTensor((num_tokens, hidden * quantized.bits // 8), (x_stride, 1), T.dtype(dtype)),
        x_sf: sf_type(T.dynamic("sf_rows"), ceil_div(hidden, channels_of_sf), layout, sf_dtype),
        tensor_sf: T.Tensor((1,), "float32"),
        out: T.Tensor((num_tokens, hidden), T.dtype(out_dtype)),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_rows) * num_tiles, threads=threads) as block:
            T.assume(x_stride % alignment == 0)
            token, channel = block // num_tiles * block_rows, block % num_tiles * block_channels
            values = T.alloc_fragment((block_rows, block_channels), "float32")
            rounded = T.alloc_fragment(values.shape, T.dtype(out_dtype))
            sf = T.alloc_fragment((block_rows // sf_rows, block_channels // sf_channels), "float32")
            T.annotate_layout({each: T.Fragment(each.shape, forward_fn=of_channel) for each in (values, rounded)})

            load_values(x, values, token, channel)
            load_sf(x_sf, sf, token, channel)
            for i, j in T.Parallel(block_rows, block_channels):
                value = values[i, j] * sf[i // sf_rows, j // sf_channels]
                rounded[i, j] = T.cast(value * tensor_sf[0] if is_nvfp4 else value, T.dtype(out_dtype))
            T.copy(rounded, out[token : token + block_rows, channel : channel + block_channels])

    return cast_back


def _check_pair(x: tuple[Tensor, Tensor], fmt: str, x_special_fmt: str | None) -> tuple[Tensor, Tensor, int]:
    """Check the formats and the data of x, not sf or blocks; return `(data, sf, hidden)`, with e2m1 data as int8."""
    check.one_of("fmt", fmt, OUT_DTYPES)
    if x_special_fmt is not None:
        check.one_of("x_special_fmt", x_special_fmt, (None, "e5m6"))
    data, sf = pair_of("x", x)
    if x_special_fmt is not None:
        num_bytes = check.tensor("x[0]", data, (torch.uint8,), ("num_tokens", "hidden * 3 / 2"), layout="rows")[1]
        if num_bytes <= 0 or num_bytes % 96:
            check.require(False, "x[0]", "a positive multiple of 96 bytes a row, for 64 channels", num_bytes)
        return data, sf, num_bytes * 2 // 3
    hidden = check.tensor("x[0]", data, (torch.float8_e4m3fn, *E2M1_DTYPES), ("num_tokens", "hidden"), layout="rows")[1]
    if data.dtype is not torch.float8_e4m3fn:
        hidden *= 2
        if data.dtype is not torch.int8:
            data = data.view(torch.int8)
    if hidden <= 0 or hidden % 64:
        check.require(False, "x", "a positive multiple of 64 channels", hidden)
    return data, sf, hidden


def _check_tensor_sf(data: Tensor, sf: Tensor, tensor_sf: Tensor | None) -> Tensor | None:
    """Check tensor_sf; return it with one dimension, or None if there is none."""
    if not isinstance(sf, Tensor) or sf.dtype is not torch.float8_e4m3fn:
        check.require(tensor_sf is None, "tensor_sf", "None unless x[1] is float8_e4m3fn", type(tensor_sf).__name__)
    if tensor_sf is None:
        return None
    check.require(data.dtype is torch.int8, "x[0]", "e2m1 beside a tensor_sf", data.dtype)
    check.require_type(isinstance(tensor_sf, Tensor), "tensor_sf", "a torch.Tensor", type(tensor_sf).__name__)
    dtype, shape, device = tensor_sf.dtype, tensor_sf.shape, tensor_sf.device
    check.require_type(dtype is torch.float32, "tensor_sf", "dtype torch.float32", dtype)
    check.require(tensor_sf.numel() == 1, "tensor_sf", "one element", tuple(shape))
    check.require(device == data.device, "tensor_sf", f"device {data.device}", str(device))
    return tensor_sf if len(shape) == 1 else tensor_sf.view(1)


@op(aligned=())
def cast_back(
    x: tuple[Tensor, Tensor],
    fmt: str,
    x_block_size: tuple[int, int] = (32, 32),
    x_special_fmt: str | None = None,
    *,
    tensor_sf: Tensor | None = None,
) -> Tensor:
    """Dequantize: data * sf of its block, rounded to float32, and that to bfloat16 where `fmt` is "bf16".

    Both roundings are to nearest, ties to even, subnormals included. Data or sf that is NaN, and infinity times 0, give
    NaN, always with the bits 0x7fffffff (bf16: 0x7fff). Names and formula are those of DeepSeek's TileKernels 1.0.0;
    NVFP4 and swizzled sf are not in it.

    Args:
        x: `(data, sf)`. data: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), the even channel in the low nibble, or e5m6 in uint8 (num_tokens, hidden * 3 / 2); hidden a
            multiple of 64, rows may be strided. sf: one for each block, (ceil(num_tokens / block tokens), ceil(hidden /
            block channels)), in any layout of tk_core.scales: float32 row major or TMA-aligned column major, packed
            UE8M0, swizzled; or float8_e4m3fn in one of these that is not packed.
        fmt: Type of the output, "bf16" or "fp32".
        x_block_size: (tokens, channels) of a block: (1, any number), or two powers of two up to 128, such as (128, 1),
            (32, 32) and (128, 128).
        x_special_fmt: "e5m6" for e5m6 data, else None.
        tensor_sf: float32, one element, for e2m1 data with an sf of float8_e4m3fn (NVFP4) and only there: the value is
            (data * sf) * tensor_sf, where the first product is exact and the second is rounded to float32. None is 1.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data, sf or tensor_sf has another dtype, or x_block_size is no pair of ints.
        ValueError: Any other argument is not as described, or is on another device.
    """
    data, sf, hidden = _check_pair(x, fmt, x_special_fmt)
    block_tokens, block_channels = block_size_of("x_block_size", x_block_size)
    if block_tokens != 1 or block_channels < 1:
        fits = block_tokens in BLOCK_SIDES and block_channels in BLOCK_SIDES
        check.require(fits, "x_block_size", "(1, channels), or two powers of two up to 128", x_block_size)
    num_tokens = data.shape[0]
    num_rows, num_cols = ceil_div(num_tokens, block_tokens), ceil_div(hidden, block_channels)
    byte_dtypes = _BYTE_SF_DTYPES if x_special_fmt is None else _BYTE_SF_DTYPES[:1]
    check_scales("x[1]", sf, num_rows, num_cols, data.device, byte_dtypes)
    tensor_sf = _check_tensor_sf(data, sf, tensor_sf)
    out = new(data.new_empty, (num_tokens, hidden), dtype=OUT_DTYPES[fmt])
    if launching(out):
        quantized = CastInput.of(data, sf, (block_tokens, block_channels), tensor_sf is not None)
        # Rows of data may have any address.
        _cast_back_kernel(quantized, hidden, out.dtype, get_arch(data.device))(data, aligned(sf), tensor_sf, out)
    return out


def cast_back_e5m6(x: tuple[Tensor, Tensor], fmt: str, x_block_size: tuple[int, int]) -> Tensor:
    """`cast_back` of e5m6 data: data * sf of its block.

    Args:
        x: `(data, sf)`. data: uint8 (num_tokens, hidden * 3 / 2), eight codes in three little-endian words; hidden a
            multiple of 64, rows may be strided. sf: as for `cast_back`.
        fmt: Type of the output, "bf16" or "fp32".
        x_block_size: As for `cast_back`.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data or sf has another dtype, or x_block_size is no pair of ints.
        ValueError: Any other argument is not as described, or is on another device.
    """
    return cast_back(x, fmt, x_block_size, "e5m6")


def per_token_cast_back(
    x: tuple[Tensor, Tensor],
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,
    *,
    tensor_sf: Tensor | None = None,
) -> Tensor:
    """Dequantize by groups of channels: data * sf of its token and group, rounded as `cast_back` does.

    Args:
        x: `(data, sf)`. data: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), or e5m6 in uint8 (num_tokens, hidden * 3 / 2); hidden a multiple of 64, rows may be strided.
            sf: (num_tokens, ceil(hidden / num_per_channels)) blocks in any layout of tk_core.scales, float8_e4m3fn if
            not packed.
        fmt: Type of the output, "bf16" or "fp32".
        num_per_channels: Channels of a group: 16, 32, 64, 128 or hidden. The last group of a row may be shorter.
        x_special_fmt: "e5m6" for e5m6 data, else None.
        tensor_sf: float32, one element, for NVFP4 and only there; see `cast_back`.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data, sf or tensor_sf has another dtype, or num_per_channels is no int.
        ValueError: Any other argument is not as described, or is on another device.
    """
    check.integer("num_per_channels", num_per_channels)
    if num_per_channels not in _GROUPS:
        *_, hidden = _check_pair(x, fmt, x_special_fmt)
        check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden))
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt, tensor_sf=tensor_sf)
