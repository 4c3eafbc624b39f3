"""The router's product: bfloat16 tokens with float32 weights, as exact as a float32 product.

    scores[t, e] = Σ_c x[t, c] · weight[e, c]

A weight is cut into three bfloat16 parts, the first 8, the next 8 and the last 8 of its 24 bits, and tensor cores
multiply x with each: all products are exact. They sum a run of 64 channels, the smallest parts first. The sums of runs
are then added in float32 with ordinary rounding, since the tensor core's own sums are cut off, not rounded: in chunks
of up to 8 runs, the chunks in 4 groups, then the groups, each in order. The cut depends on K alone, so a token's bits
depend on neither the other tokens nor on where the work is done.

One kernel (hopper/router.py) writes the sums of groups, or for few tokens those of chunks, and a second one adds them
up. docs/tuning/gemm-router.md has measurements.
"""

from torch import Tensor

from tk_core.arch import UnsupportedArchError, get_arch
from tk_core.num_sms import get_num_sms
from tk_core.op import launching, op
from tk_gemm.check import BF16, FLOAT32, matrix, positive_multiple, result
from tk_gemm.hopper.router import router_kernel, sum_parts_kernel
from tk_gemm.hopper.router_config import RUN, Cut, Plan
from tk_gemm.tma import for_tma


@op(writes=("d",), aligned=(), min_sm=90)
def router_gemm_nt(x: Tensor, weight: Tensor, d: Tensor | None = None) -> Tensor:
    """scores = x · weightᵀ of bfloat16 x and float32 weights, as exact as a product in float32.

    The error is that of adding up in float32: weights are not rounded. A token's bits depend on that row of x and on
    weight alone. Scores of an infinite or NaN weight are infinite or NaN as in a float32 product; those of a row of x
    with an infinity are infinite or NaN. Weights from 2^-110 on are exact; smaller ones are rounded to multiples of
    2^-133, the least bfloat16.

    Args:
        x: bfloat16 (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 64.
        weight: float32 (N, K), rows strided by multiples of 16 bytes; N a multiple of 8.
        d: float32 (M, N), rows strided by multiples of 16 bytes, written; by default new.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes) or device is not as described, or d overlaps an operand.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a), unless TK_BACKEND=reference.
    """
    num_tokens, num_channels = matrix("x", x, BF16, ("M", "K"))
    positive_multiple("x (K)", num_channels, RUN)
    num_experts, _ = matrix("weight", weight, FLOAT32, ("N", num_channels), x.device)
    positive_multiple("weight (N)", num_experts, 8)
    d = result(d, None, (num_tokens, num_experts), x, FLOAT32)
    if launching(d):
        arch = get_arch(x.device)
        if not arch.has_wgmma:
            raise UnsupportedArchError("tk_gemm.router_gemm_nt", arch.name, "sm_90a, or the reference backend")
        launch_router(x, weight, d, Plan.best(*d.shape, num_channels, get_num_sms(x.device)))
    return d


def launch_router(x: Tensor, weight: Tensor, d: Tensor, plan: Plan) -> None:
    """Launch the kernels of a plan for x (M, K), weight (N, K) and d (M, N), none of them empty."""
    num_experts, num_channels = d.shape[1], x.shape[1]
    config, num_workers = plan
    cut, num_parts, arch = Cut.of(num_channels), plan.num_parts(num_channels), get_arch(x.device)
    out = d.new_empty((num_parts, *d.shape))
    router_kernel(config, arch)(for_tma(x), weight, out, cut.num_chunks, num_workers)
    quads = num_experts // 4, 4
    sum_parts_kernel(num_parts, cut.num_groups, arch)(out.unflatten(2, quads), d.unflatten(1, quads))
