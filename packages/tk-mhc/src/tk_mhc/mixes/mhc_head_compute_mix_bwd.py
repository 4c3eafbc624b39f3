"""mhc_head_compute_mix_bwd: gradients of `mhc_head_compute_mix` by mix, scale and base.

    d_z[t, i] = d_o[t, i] · s(1 - s),  s = sigmoid(mix[t, i] · scale + base[i])
    d_mix = d_z · scale;  d_base[i] = Σ_t d_z[t, i];  d_scale = Σ_t Σ_i d_z[t, i] · mix[t, i]

in float32, the sums in float64.

As in `mhc_pre_split_mixes_bwd`, 128 thread blocks add up a range of tokens each, and a second kernel the ranges.
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
from tk_mhc.lib.token_sums import NUM_RANGES, sum_ranges_kernel
from tk_mhc.lib.tokens import MHC_MULTS


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_head_compute_mix_bwd_kernel(mhc_mult: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.mixes import sigmoid
    from tk_mhc.lib.mixes_bwd import add_to_sums, store_sums, thread_per_column

    # 128 threads, and four elements of a thread in flight; they decide the order of the sums. Untuned.
    rows = 128 // mhc_mult
    block_tokens = 4 * rows
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_head_compute_mix_bwd(
        d_o: T.Tensor((num_tokens, mhc_mult), "float32"),
        input_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_scale: T.Tensor((1,), "float32"),
        mhc_base: T.Tensor((mhc_mult,), "float32"),
        d_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        sums: T.Tensor((NUM_RANGES, 1 + mhc_mult), "float64"),
    ) -> None:
        with T.Kernel(NUM_RANGES, threads=rows * mhc_mult) as token_range:
            num_tiles = T.ceildiv(num_tokens, NUM_RANGES * block_tokens)
            mix = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            d_z = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            s = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            base_sums = T.alloc_fragment((rows, mhc_mult), "float64")
            scale_sums = T.alloc_fragment((rows, mhc_mult), "float64")
            T.annotate_layout({x: thread_per_column(*x.shape, rows) for x in (mix, d_z, s, base_sums, scale_sums)})
            T.clear(base_sums)
            T.clear(scale_sums)

            for tile in T.serial(num_tiles):
                first = (token_range * num_tiles + tile) * block_tokens
                # Rows beyond the last token are zeros, and add nothing.
                T.copy(input_mix[first : first + block_tokens, :], mix)
                T.copy(d_o[first : first + block_tokens, :], d_z)
                for t, i in T.Parallel(block_tokens, mhc_mult):
                    s[t, i] = sigmoid(mix[t, i] * mhc_scale[0] + mhc_base[i])
                for t, i in T.Parallel(block_tokens, mhc_mult):
                    d_z[t, i] *= s[t, i] * (T.float32(1) - s[t, i])
                add_to_sums(d_z, mix, base_sums, scale_sums)
                for t, i in T.Parallel(block_tokens, mhc_mult):
                    d_z[t, i] *= mhc_scale[0]
                T.copy(d_z, d_mix[first : first + block_tokens, :])

            store_sums(base_sums, scale_sums, ((0, 0, mhc_mult),), sums, token_range)

    return mhc_head_compute_mix_bwd


@op(aligned=("d_o", "input_mix", "mhc_base"))
def mhc_head_compute_mix_bwd(
    d_o: Tensor, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `mhc_head_compute_mix` by mix, scale and base.

    d_z = d_o · s(1 - s) with s = sigmoid(mix · scale + base); d_mix = d_z · scale, d_scale = Σ d_z · mix and
    d_base = Σ d_z over tokens. The sums are float64, of 128 ranges of tokens, so their bits are the same on any number
    of SMs; those of no tokens are zeros. Source: arXiv 2512.24880.

    Args:
        d_o: float32 (..., m), contiguous, the gradient by the result.
        input_mix: float32 (..., m), contiguous, as the forward was given it; m is 2, 4 or 8.
        mhc_scale: float32 (1).
        mhc_base: float32 (m).

    Returns:
        d_mix float32 (..., m), d_scale float32 (1), d_base float32 (m).

    Raises:
        TypeError: an argument is not a float32 tensor.
        ValueError: a shape, stride or device does not fit, or m is none of these.
    """
    dtypes = (torch.float32,)
    *_, mhc_mult = check.tensor("input_mix", input_mix, dtypes, (..., "mhc_mult"))
    check.one_of("mhc_mult (last dimension of input_mix)", mhc_mult, MHC_MULTS)
    device = input_mix.device
    check.tensor("d_o", d_o, dtypes, tuple(input_mix.shape), device=device)
    check.tensor("mhc_scale", mhc_scale, dtypes, (1,), device=device)
    check.tensor("mhc_base", mhc_base, dtypes, (mhc_mult,), device=device)
    d_mix = new(input_mix.new_empty, input_mix.shape)
    d_scale, d_base = new(input_mix.new_empty, (1,)), new(input_mix.new_empty, (mhc_mult,))
    if not launching(d_mix, d_scale, d_base):
        return d_mix, d_scale, d_base
    if d_mix.numel() == 0:
        return d_mix, d_scale.zero_(), d_base.zero_()
    arch = get_arch(device)
    sums = input_mix.new_empty((NUM_RANGES, 1 + mhc_mult), dtype=torch.float64)
    backward = _mhc_head_compute_mix_bwd_kernel(mhc_mult, arch)
    backward(flat(d_o, 1), flat(input_mix, 1), mhc_scale, mhc_base, flat(d_mix, 1), sums)
    sum_ranges_kernel(1, mhc_mult, arch)(sums, d_scale, d_base)
    return d_mix, d_scale, d_base
