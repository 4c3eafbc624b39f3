"""sinkhorn_normalize: matrices of streams made doubly stochastic, nearly, by Sinkhorn's iterations.

    x = softmax(x, -1) + eps;  x = x / (Σ over rows + eps)
    repeat - 1 times:  x = x / (Σ over columns + eps);  x = x / (Σ over rows + eps)

in float32.

A thread has the matrix of a token in registers, so the iterations need neither shared memory nor other threads. Time is
latency: each half of an iteration waits for m - 1 additions, a reciprocal and a product.
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
from tk_mhc.lib.tokens import MHC_MULTS, check_repeat


@kernel(pass_configs=DIRECT_COPIES)
def _sinkhorn_normalize_kernel(mhc_mult: int, repeat: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.mixes import sinkhorn, token_per_thread

    block_tokens = 32  # One warp, so that 8192 tokens reach all SMs. Untuned.
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def sinkhorn_normalize(
        x: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        out: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        eps: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_tokens), threads=block_tokens) as block:
            first = block * block_tokens
            comb = T.alloc_fragment((block_tokens, mhc_mult, mhc_mult), "float32")
            T.annotate_layout({comb: token_per_thread(comb.shape)})
            T.copy(x[first : first + block_tokens, :, :], comb)
            sinkhorn(comb, repeat, eps)
            T.copy(comb, out[first : first + block_tokens, :, :])

    return sinkhorn_normalize


@op
def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Sinkhorn's iterations: softmax of rows, plus eps; then columns and rows in turn divided by their sums plus eps.

    x = softmax(x, -1) + eps, x /= Σ over dimension -2 + eps; then repeat - 1 times x /= Σ over dimension -1 + eps,
    x /= Σ over dimension -2 + eps. In float32, within torch.testing's tolerances of the reference. With an eps of 0, a
    sum below 2^-126 counts as 0. Source: arXiv 2512.24880.

    Args:
        x: float32 (..., m, m); m is 2, 4 or 8. A non-contiguous x is copied first.
        repeat: iterations, 1 to 1000; each number compiles a kernel of its own.
        eps: added to the softmax and to sums; not negative.

    Returns:
        float32 (..., m, m), contiguous.

    Raises:
        TypeError: x is not a float32 tensor, repeat not an int or eps not a number.
        ValueError: x is not square in its last dimensions, or m, repeat or eps is out of range.
    """
    leading, mhc_mult = check_matrices("x", x)
    check_repeat("repeat", repeat)
    check.number("eps", eps, at_least=0)
    out = new(x.new_empty, (*leading, mhc_mult, mhc_mult))
    if launching(out):
        normalize = _sinkhorn_normalize_kernel(mhc_mult, repeat, get_arch(x.device))
        normalize(flat(x.contiguous(), 2), flat(out, 2), float(eps))
    return out


def check_matrices(name: str, x: Any) -> tuple[tuple[int, ...], int]:
    """Check a tensor of float32 matrices (..., m, m) of any strides, and return its leading dimensions and m."""
    *leading, rows, columns = check.tensor(name, x, (torch.float32,), (..., "mhc_mult", "mhc_mult"), layout="any")
    check.require(rows == columns, name, "a square matrix in the last two dimensions", tuple(x.shape))
    check.one_of(f"mhc_mult (last dimension of {name})", columns, MHC_MULTS)
    return tuple(leading), columns
