"""sinkhorn_normalize_bwd: gradient of `sinkhorn_normalize` through all its iterations.

The forward's steps are taken again from x, then backwards. A step y = x / s with s = Σ x + eps has

    d_x = (d_y - Σ d_y · y) / s        the sums over the same dimension

and the softmax y = softmax(x) has d_x = y · (d_y - Σ d_y · y). In float32.

A thread has the matrix of a token and its gradient in registers. Of each step it keeps the reciprocals of the m sums,
in shared memory: m numbers, where the matrix would be m². On the way back they give the matrix before the step, y · s.
This adds to the gradient's error a hundredth of what torch.testing allows after 20 iterations, and a fifth after 800.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import flat
from tk_mhc.lib.tokens import check_repeat
from tk_mhc.mixes.sinkhorn_normalize import check_matrices


def tokens_a_block(mhc_mult: int, repeat: int, arch: Arch) -> int:
    """A token for each thread of a warp, or as many tokens as shared memory has room for the sums of. Untuned."""
    bytes_of_token = 4 * mhc_mult * (2 * repeat - 1)
    # 1 KiB to spare; the KiB that CUDA takes for itself is no part of max_shared_memory.
    max_bytes = arch.max_shared_memory - 1024
    return next(tokens for tokens in (32, 16, 8, 4, 2, 1) if tokens == 1 or tokens * bytes_of_token <= max_bytes)


@kernel(pass_configs=DIRECT_COPIES)
def _sinkhorn_normalize_bwd_kernel(mhc_mult: int, repeat: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.mixes import divide, entry, reciprocal, scale_lines, softmax, softmax_plus_eps, token_per_thread

    block_tokens = tokens_a_block(mhc_mult, repeat, arch)
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def dot_lines(grad: T.Buffer, comb: T.Buffer, dots: T.Buffer, is_row: bool) -> None:
        T.clear(dots)
        for k in T.unroll(mhc_mult):
            for t, line in T.Parallel(block_tokens, mhc_mult):
                dots[t, line] += grad[entry(t, line, k, is_row)] * comb[entry(t, line, k, is_row)]

    @T.macro
    def undo_division(grad: T.Buffer, comb: T.Buffer, factors: T.Buffer, dots: T.Buffer, is_row: bool) -> None:
        dot_lines(grad, comb, dots, is_row)
        for t, i, j in T.Parallel(block_tokens, mhc_mult, mhc_mult):
            line = i if is_row else j
            grad[t, i, j] = (grad[t, i, j] - dots[t, line]) * factors[t, line]
        for t, line in T.Parallel(block_tokens, mhc_mult):
            factors[t, line] = reciprocal(factors[t, line])
        scale_lines(comb, factors, is_row)

    @T.prim_func
    def sinkhorn_normalize_bwd(
        d_o: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        x: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        d_x: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        eps: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_tokens), threads=32) as block:
            first = block * block_tokens
            comb = T.alloc_fragment((block_tokens, mhc_mult, mhc_mult), "float32")
            grad = T.alloc_fragment((block_tokens, mhc_mult, mhc_mult), "float32")
            factors = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            dots = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            reciprocals = T.alloc_shared((2 * repeat - 1, block_tokens, mhc_mult), "float32")
            T.annotate_layout({y: token_per_thread(y.shape) for y in (comb, grad, factors, dots)})

            T.copy(x[first : first + block_tokens, :, :], comb)
            T.copy(d_o[first : first + block_tokens, :, :], grad)
            softmax_plus_eps(comb, factors, eps)
            divide(comb, factors, eps, is_row=False)
            T.copy(factors, reciprocals[0, :, :])
            for k in T.serial(repeat - 1):
                divide(comb, factors, eps, is_row=True)
                T.copy(factors, reciprocals[2 * k + 1, :, :])
                divide(comb, factors, eps, is_row=False)
                T.copy(factors, reciprocals[2 * k + 2, :, :])
            for k in T.serial(repeat - 1):
                T.copy(reciprocals[2 * (repeat - 1 - k), :, :], factors)
                undo_division(grad, comb, factors, dots, is_row=False)
                T.copy(reciprocals[2 * (repeat - 1 - k) - 1, :, :], factors)
                undo_division(grad, comb, factors, dots, is_row=True)
            T.copy(reciprocals[0, :, :], factors)
            undo_division(grad, comb, factors, dots, is_row=False)

            # The softmax from x again: what is left in comb has gone there and back.
            T.copy(x[first : first + block_tokens, :, :], comb)
            softmax(comb, factors)
            dot_lines(grad, comb, dots, is_row=True)
            for t, i, j in T.Parallel(block_tokens, mhc_mult, mhc_mult):
                grad[t, i, j] = comb[t, i, j] * (grad[t, i, j] - dots[t, i])
            T.copy(grad, d_x[first : first + block_tokens, :, :])

    return sinkhorn_normalize_bwd


@op
def sinkhorn_normalize_bwd(d_o: Tensor, x: Tensor, repeat: int, eps: float) -> Tensor:
    """Gradient by x of `sinkhorn_normalize(x, repeat, eps)`, through all its iterations.

    Source: arXiv 2512.24880. In float32, within torch.testing's tolerances of the gradient in float64.

    Args:
        d_o: float32 (..., m, m), the gradient by the result. A non-contiguous one is copied first.
        x: float32 (..., m, m), as `sinkhorn_normalize` was given it; m is 2, 4 or 8. It is copied like d_o.
        repeat: iterations, 1 to 1000; each number compiles a kernel of its own.
        eps: added to the softmax and to sums; not negative.

    Returns:
        float32 (..., m, m), contiguous.

    Raises:
        TypeError: d_o or x is not a float32 tensor, repeat not an int or eps not a number.
        ValueError: a shape or device does not fit, or m, repeat or eps is out of range.
    """
    leading, mhc_mult = check_matrices("x", x)
    shape = (*leading, mhc_mult, mhc_mult)
    check.tensor("d_o", d_o, (torch.float32,), shape, layout="any", device=x.device)
    check_repeat("repeat", repeat)
    check.number("eps", eps, at_least=0)
    d_x = new(x.new_empty, shape)
    if launching(d_x):
        backward = _sinkhorn_normalize_bwd_kernel(mhc_mult, repeat, get_arch(x.device))
        backward(flat(d_o.contiguous(), 2), flat(x.contiguous(), 2), flat(d_x, 2), float(eps))
    return d_x
