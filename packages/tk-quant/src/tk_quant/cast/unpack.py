"""unpack_from_e2m1fn_x2: convert each byte to the two floats that its nibbles encode, the low nibble first.

Tensors are treated as flat. A vector is the neighbouring values that fill 16 bytes of the output. Thread t of a thread
block of n threads converts its vectors t, t + n and so on:

    x      [ thread 0 | thread 1 | … | thread 0 | … ]      each field 2 or 4 bytes
    out    [ thread 0 | thread 1 | … | thread 0 | … ]      and 16
"""

from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import aligned
from tk_quant.cast.format import E2M1_DTYPES

_DTYPES = (torch.uint8, *E2M1_DTYPES)
_OUT_DTYPES = (torch.float32, torch.bfloat16)

# H200, 8192 x 7168: 38.1 µs to bfloat16 and 69.1 to float32; with 4 vectors 38.2 and 70.2, with 8 39.3 and 71.6.
_THREADS = 256
_VECTORS = 2
"""Vectors of a thread, all loaded before the first is stored."""


@kernel(pass_configs={**DIRECT_COPIES, "tl.enable_lower_ldgstg": True})
def _unpack_kernel(ndim: int, out_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    vectors, vector, dtype = _THREADS * _VECTORS, 16 // out_dtype.itemsize, T.dtype(out_dtype)
    # The host passes tensors in their own shape: a flat view would cost it more than the launch's other checks.
    leading = tuple(T.dynamic(f"size_{i}") for i in range(ndim - 1))
    row_bytes, row_values = T.dynamic("row_bytes"), T.dynamic("row_values")
    num_bytes = reduce(mul, (T.cast(size, "int64") for size in (*leading, row_bytes)))
    num_vectors = num_bytes // (vector // 2)

    def in_turn(index: Any, element: Any) -> tuple[Any, Any]:
        return index % _THREADS, index // _THREADS * vector + element

    @T.macro
    def unpack(x: T.Buffer, out: T.Buffer, first: T.int64, shape: tuple[int, int]) -> None:
        """Convert a tile of this shape, rows of x from `first` on, and store it in out; skip rows past the end."""
        e2m1, e4m3 = T.alloc_fragment(shape, "float4_e2m1fn"), T.alloc_fragment(shape, "float8_e4m3fn")
        floats = T.alloc_fragment(shape, dtype)
        T.annotate_layout({each: T.Fragment(shape, forward_fn=in_turn) for each in (e2m1, e4m3, floats)})
        T.copy(x[first : first + shape[0], :], e2m1)
        T.copy(e2m1, e4m3)
        T.copy(e4m3, floats)
        T.copy(floats, out[first : first + shape[0], :])

    @T.prim_func
    def unpack_from_e2m1fn_x2(
        x: T.Tensor((*leading, row_bytes), "int8"), out: T.Tensor((*leading, row_values), dtype)
    ) -> None:
        with T.Kernel(T.cast(T.ceildiv(num_bytes, vectors * vector // 2), "int32"), threads=_THREADS) as block:
            first = T.cast(block, "int64") * vectors
            x_vectors = T.Tensor((num_vectors, vector), "float4_e2m1fn", x.data)
            out_vectors = T.Tensor((num_vectors, vector), dtype, out.data)
            unpack(x_vectors, out_vectors, first, (vectors, vector))
            if first + vectors >= num_vectors:  # the tail, which is shorter than a vector
                x_bytes = T.Tensor((num_bytes, 2), "float4_e2m1fn", x.data)
                out_pairs = T.Tensor((num_bytes, 2), dtype, out.data)
                unpack(x_bytes, out_pairs, num_vectors * (vector // 2), (vector // 2, 2))

    return unpack_from_e2m1fn_x2


@op(aligned=())
def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
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
    check.require_type(isinstance(x, Tensor), "x", "a torch.Tensor", type(x).__name__)
    check.require(x.ndim > 0, "x", "at least one dimension", tuple(x.shape))
    shape = check.tensor("x", x, _DTYPES, ("size",) * x.ndim)
    check.require_type(out_dtype in _OUT_DTYPES, "out_dtype", "torch.float32 or torch.bfloat16", out_dtype)
    out = new(x.new_empty, (*shape[:-1], 2 * shape[-1]), dtype=out_dtype)
    if launching(out):
        _unpack_kernel(x.ndim, out_dtype, get_arch(x.device))(aligned(x.view(torch.int8), 4), out)
    return out
