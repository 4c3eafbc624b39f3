"""engram_sinkhorn_momentum_update: the moving average of a gradient, from which the optimizer makes its step.

    m' = fma(m, β, RN((1 - β) · g))        m ← m', rounded to the buffer's dtype
    out = fma(g, 1 - β, RN(β · m')) with nesterov, where m' is not rounded, else m'

in float32; 1 - β is computed in float64, then rounded: every bit is defined.
Source: the optimizer step for embedding tables of TileKernels 2.1.0, `engram_sinkhorn_momentum_update`.

A thread takes up to eight neighbouring elements, twice, so that several loads are in flight:

    [ thread 0 | thread 1 | … | thread 255 ] [ thread 0 | … ]       each field 8 elements
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR

_DTYPES = (torch.bfloat16, torch.float32)


_THREADS = 256
_BLOCK_VECTORS = 2 * _THREADS
"""Two vectors of a thread. Untuned."""


@kernel(pass_configs=DIRECT_COPIES)
def _momentum_update_kernel(
    grad_dtype: torch.dtype, buffer_dtype: torch.dtype, nesterov: bool, vector: int, arch: Arch
) -> Any:
    """`vector`: neighbouring elements of a thread; divides their number, so that no vector is cut at the end."""
    import tilelang.language as T

    block_vectors = _BLOCK_VECTORS
    num_vectors = T.dynamic("num_vectors")

    @T.prim_func
    def engram_sinkhorn_momentum_update(
        grad: T.Tensor((num_vectors, vector), grad_dtype),
        momentum_buffer: T.Tensor((num_vectors, vector), buffer_dtype),
        out: T.Tensor((num_vectors, vector), "float32"),
        beta: T.float32,
        rest: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_vectors, block_vectors), threads=_THREADS) as block:
            first = block * block_vectors
            g = T.alloc_fragment((block_vectors, vector), grad_dtype)
            m = T.alloc_fragment((block_vectors, vector), buffer_dtype)
            average = T.alloc_fragment((block_vectors, vector), "float32")
            T.copy(grad[first : first + block_vectors, :], g)
            T.copy(momentum_buffer[first : first + block_vectors, :], m)
            for i, v in T.Parallel(block_vectors, vector):
                average[i, v] = T.fma(T.cast(m[i, v], "float32"), beta, rest * T.cast(g[i, v], "float32"))
            T.copy(average, momentum_buffer[first : first + block_vectors, :])
            if nesterov:
                for i, v in T.Parallel(block_vectors, vector):
                    average[i, v] = T.fma(T.cast(g[i, v], "float32"), rest, beta * average[i, v])
            T.copy(average, out[first : first + block_vectors, :])

    return engram_sinkhorn_momentum_update


@op(writes=("momentum_buffer",))
def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """Moving average of a gradient: m ← β·m + (1 - β)·g in place; returns g·(1 - β) + β·m, or m without nesterov.

    In float32, m' = fma(m, β, (1 - β)·g); the buffer gets m' rounded to its dtype, the result is made from m' itself:
    fma(g, 1 - β, β·m'). β is beta1 as float32, 1 - β the rounded float64 difference. Every bit equals the reference's.
    Source: TileKernels 2.1.0's function of this name.

    Args:
        grad: g, bfloat16 or float32, contiguous, of any shape.
        momentum_buffer: m, bfloat16 or float32, contiguous, of the same shape; updated in place, and not grad's memory.
        beta1: β, a number from 0 to 1.
        nesterov: whether the result looks one step ahead.

    Returns:
        float32, of the same shape.

    Raises:
        TypeError: an argument is not a tensor of its dtype, beta1 not a number or nesterov not a bool.
        ValueError: a shape, stride or device does not fit, or beta1 is out of range.
    """
    check.tensor("grad", grad, _DTYPES, (...,))
    check.tensor("momentum_buffer", momentum_buffer, _DTYPES, tuple(grad.shape), device=grad.device)
    check.number("beta1", beta1, at_least=0)
    check.require(beta1 <= 1, "beta1", "at most 1", beta1)
    check.flag("nesterov", nesterov)
    out = new(grad.new_empty, grad.shape, dtype=torch.float32)
    if launching(out):
        vector = gcd(grad.numel(), VECTOR)
        update = _momentum_update_kernel(grad.dtype, momentum_buffer.dtype, nesterov, vector, get_arch(grad.device))
        update(*(x.view(-1, vector) for x in (grad, momentum_buffer, out)), float(beta1), 1.0 - float(beta1))
    return out
