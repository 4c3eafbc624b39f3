"""mhc_head_compute_mix: the weights with which the streams collapse at the end of a model.

    out[t, i] = sigmoid(mix[t, i] · scale + base[i]) + pre_eps

in float32.
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
from tk_mhc.lib.tokens import MHC_MULTS

_THREADS = 64


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_head_compute_mix_kernel(mhc_mult: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.mixes import sigmoid

    block_tokens = 4 * _THREADS // mhc_mult  # Four elements a thread: a load takes 16 bytes. Untuned.
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_head_compute_mix(
        input_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_scale: T.Tensor((1,), "float32"),
        mhc_base: T.Tensor((mhc_mult,), "float32"),
        out: T.Tensor((num_tokens, mhc_mult), "float32"),
        pre_eps: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_tokens), threads=_THREADS) as block:
            first = block * block_tokens
            mix = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            T.copy(input_mix[first : first + block_tokens, :], mix)
            for t, i in T.Parallel(block_tokens, mhc_mult):
                mix[t, i] = sigmoid(mix[t, i] * mhc_scale[0] + mhc_base[i]) + pre_eps
            T.copy(mix, out[first : first + block_tokens, :])

    return mhc_head_compute_mix


@op(aligned=("input_mix", "mhc_base"))
def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """Weights of the last collapse: sigmoid(mix · scale + base) + pre_eps in float32.

    Source: arXiv 2512.24880. `mhc_pre_apply_mix` takes them with a last dimension of 1 added.

    Args:
        input_mix: float32 (..., m), contiguous, as `mhc_pre_norm_fn` returns it for a head; m is 2, 4 or 8.
        mhc_scale: float32 (1).
        mhc_base: float32 (m).
        mhc_pre_eps: added to the sigmoids.

    Returns:
        float32 (..., m).

    Raises:
        TypeError: an argument is not a tensor of its dtype, or not a number.
        ValueError: a shape, stride or device does not fit, m is none of these, or the number is not finite.
    """
    *_, mhc_mult = check.tensor("input_mix", input_mix, (torch.float32,), (..., "mhc_mult"))
    check.one_of("mhc_mult (last dimension of input_mix)", mhc_mult, MHC_MULTS)
    check.tensor("mhc_scale", mhc_scale, (torch.float32,), (1,), device=input_mix.device)
    check.tensor("mhc_base", mhc_base, (torch.float32,), (mhc_mult,), device=input_mix.device)
    check.number("mhc_pre_eps", mhc_pre_eps)
    out = new(input_mix.new_empty, input_mix.shape)
    if launching(out):
        compute_mix = _mhc_head_compute_mix_kernel(mhc_mult, get_arch(input_mix.device))
        compute_mix(flat(input_mix, 1), mhc_scale, mhc_base, flat(out, 1), float(mhc_pre_eps))
    return out
