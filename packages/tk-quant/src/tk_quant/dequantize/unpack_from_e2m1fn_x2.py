"""unpack_from_e2m1fn_x2: each byte to the two floats that its nibbles stand for, the low one first.

A thread takes what becomes 16 bytes, `pieces` times, a block's width apart.
"""

from dataclasses import dataclass
from functools import cache, reduce
from operator import mul
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.memory import load_16_bits
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.device.fp4 import decode_e2m1x4

_FLOAT4_DTYPE = getattr(torch, "float4_e2m1fn_x2", None)
_DTYPES = (torch.int8, torch.uint8) + ((_FLOAT4_DTYPE,) if _FLOAT4_DTYPE is not None else ())
_OUT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class UnpackConfig:
    """Launch knobs."""

    threads: int
    pieces: int
    """Pieces of a thread, each 16 bytes of the output."""

    @staticmethod
    @cache
    def best(arch: Arch) -> "UnpackConfig":
        """The configuration for an architecture."""
        # Untuned.
        return UnpackConfig(threads=256, pieces=4)


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _unpack_kernel(ndim: int, aligned: bool, out_dtype: torch.dtype, config: UnpackConfig, arch: Arch) -> Any:
    import tilelang.language as T

    threads, pieces = config.threads, config.pieces
    vec = 16 // out_dtype.itemsize
    piece_bytes = vec // 2
    tile_bytes = threads * pieces * piece_bytes
    out_element = T.dtype(out_dtype)
    # The host passes tensors as they are, for a flat view would cost it more than the launch's other checks.
    leading = tuple(T.dynamic(f"size_{i}") for i in range(ndim - 1))
    row_bytes, row_values = T.dynamic("row_bytes"), T.dynamic("row_values")
    num_bytes, num_values = (
        reduce(mul, (T.cast(size, "int64") for size in (*leading, last))) for last in (row_bytes, row_values)
    )

    @T.macro
    def convert(word: T.uint32, rounded: T.Buffer) -> None:
        values = T.alloc_local((vec,), "float32")
        for j in T.unroll(vec // 4):
            decode_e2m1x4(word if j == 0 else word >> T.uint32(16), T.address_of(values[4 * j]))
        for j in T.vectorized(vec):
            rounded[j] = T.cast(values[j], out_element)

    @T.prim_func
    def unpack_from_e2m1fn_x2(
        packed: T.Tensor((*leading, row_bytes), "int8"), floats: T.Tensor((*leading, row_values), out_element)
    ) -> None:
        with T.Kernel(T.cast(T.ceildiv(num_bytes, T.int64(tile_bytes)), "int32"), threads=threads) as block:
            x = T.view(packed, (num_bytes,))
            out = T.view(floats, (num_values,))
            thread = T.get_thread_binding()
            first = T.cast(block, "int64") * tile_bytes + thread * piece_bytes
            words = T.alloc_local((pieces,), "uint32")
            rounded = T.alloc_local((vec,), out_element)
            rounded_words = T.view(rounded, (4,), "uint32")
            elements = T.view(words, (pieces, 4), "int8")
            for i in T.unroll(pieces):
                start = first + i * (threads * piece_bytes)
                if aligned and piece_bytes == 4:
                    words[i] = T.ldg32(x[start], pred=start + piece_bytes <= num_bytes)
                elif aligned:
                    words[i] = load_16_bits(T.address_of(x[start]), start + piece_bytes <= num_bytes)
                elif start + piece_bytes <= num_bytes:
                    for j in T.unroll(piece_bytes):
                        elements[i, j] = x[start + j]
            for i in T.unroll(pieces):
                start = first + i * (threads * piece_bytes)
                if start + piece_bytes <= num_bytes:
                    convert(words[i], rounded)
                    T.stg128(out[2 * start], rounded_words[0:4])
                elif start < num_bytes:
                    words[i] = T.uint32(0)
                    for j in T.unroll(piece_bytes - 1):
                        if start + j < num_bytes:
                            elements[i, j] = x[start + j]
                    convert(words[i], rounded)
                    for j in T.unroll(vec - 2):
                        if 2 * start + j < num_values:
                            out[2 * start + j] = rounded[j]

    return unpack_from_e2m1fn_x2


def _unpack_reference(x: torch.Tensor, out: torch.Tensor) -> None:
    from tk_quant.reference.dequantize.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2

    out.copy_(unpack_from_e2m1fn_x2(x, out.dtype))


@op("tk_quant::unpack_from_e2m1fn_x2_out", mutates=("out",), reference=_unpack_reference)
def _unpack_out(x: torch.Tensor, out: torch.Tensor) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    out_dtype = out.dtype
    # Contiguous, so that only its start matters.
    aligned = x.data_ptr() % (8 // out_dtype.itemsize) == 0
    _unpack_kernel(x.ndim, aligned, out_dtype, UnpackConfig.best(arch), arch)(x, out)


@replayable
def unpack_from_e2m1fn_x2(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed e2m1 (FP4) codes to floats, exactly.

    A code is sign, two exponent bits with bias 1, one mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, -0
    included. The name is that of DeepSeek's TileKernels 1.0.0.

    Args:
        x: (..., n), int8, uint8 or float4_e2m1fn_x2, contiguous: two codes a byte, the even element in the low nibble.
        out_dtype: torch.float32 or torch.bfloat16.

    Returns:
        (..., 2 * n) of `out_dtype`, contiguous.

    Raises:
        TypeError: x is no tensor or has another dtype, or `out_dtype` is another one.
        ValueError: x has no dimension or is not contiguous.
    """
    check.require_type(isinstance(x, torch.Tensor), "x", "a torch.Tensor", type(x).__name__)
    check.require(x.ndim > 0, "x", "at least one dimension", tuple(x.shape))
    shape = check.tensor("x", x, _DTYPES, ("size",) * x.ndim)
    check.require_type(out_dtype in _OUT_DTYPES, "out_dtype", "torch.float32 or torch.bfloat16", out_dtype)
    if x.dtype is not torch.int8:
        x = x.view(torch.int8)
    out = x.new_empty((*shape[:-1], 2 * shape[-1]), dtype=out_dtype)
    _unpack_out(x, out)
    return out
