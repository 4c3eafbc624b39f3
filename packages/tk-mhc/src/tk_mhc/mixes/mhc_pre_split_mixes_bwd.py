"""mhc_pre_split_mixes_bwd: gradients of `mhc_pre_split_mixes` by mixes, scale and base.

    z = mixes · scale of the group + base, s = sigmoid(z)
    d_z = d_pre · s(1 - s)                      first m columns
          d_post · post_mult_value · s(1 - s)   next m
          d_comb                                last m², unless there are 2m columns, without comb
    d_mixes = d_z · scale of the group
    d_base[k] = Σ_t d_z[t, k];  d_scale[g] = Σ_t Σ_(k in group g) d_z[t, k] · mixes[t, k]

in float32, the sums in float64.

The tokens are cut into 128 ranges, whatever the GPU. A thread block takes a range, tile by tile; a thread adds up its
elements of every tile, all of one column, and at the end the threads' sums are added up. A second kernel adds up the
ranges.
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
from tk_mhc.lib.tokens import check_mixes, mix_counts


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_pre_split_mixes_bwd_kernel(mhc_mult: int, has_comb: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.mixes import sigmoid
    from tk_mhc.lib.mixes_bwd import add_to_sums, store_sums, thread_per_column

    m = mhc_mult
    num_columns = mix_counts(m)[0 if has_comb else 1]
    groups = ((0, 0, m), (1, m, 2 * m), *([(2, 2 * m, num_columns)] if has_comb else []))
    # At most 256 threads, and eight elements of a thread in flight; they decide the order of the sums. Untuned.
    rows = 1 << ((256 // num_columns).bit_length() - 1)
    block_tokens = 8 * rows
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_pre_split_mixes_bwd(
        d_pre: T.Tensor((num_tokens, m), "float32"),
        d_post: T.Tensor((num_tokens, m), "float32"),
        d_comb: T.Tensor((num_tokens, m * m), "float32"),
        input_mixes: T.Tensor((num_tokens, num_columns), "float32"),
        mhc_scale: T.Tensor((len(groups),), "float32"),
        mhc_base: T.Tensor((num_columns,), "float32"),
        d_mixes: T.Tensor((num_tokens, num_columns), "float32"),
        sums: T.Tensor((NUM_RANGES, len(groups) + num_columns), "float64"),
        post_mult_value: T.float32,
    ) -> None:
        with T.Kernel(NUM_RANGES, threads=rows * num_columns) as token_range:
            num_tiles = T.ceildiv(num_tokens, NUM_RANGES * block_tokens)
            mixes = T.alloc_fragment((block_tokens, num_columns), "float32")
            d_z = T.alloc_fragment((block_tokens, num_columns), "float32")
            s = T.alloc_fragment((block_tokens, num_columns), "float32")
            base_sums = T.alloc_fragment((rows, num_columns), "float64")
            scale_sums = T.alloc_fragment((rows, num_columns), "float64")
            T.annotate_layout({x: thread_per_column(*x.shape, rows) for x in (mixes, d_z, s, base_sums, scale_sums)})
            T.clear(base_sums)
            T.clear(scale_sums)

            for tile in T.serial(num_tiles):
                first = (token_range * num_tiles + tile) * block_tokens
                # Rows beyond the last token are zeros, and add nothing.
                T.copy(input_mixes[first : first + block_tokens, :], mixes)
                for t, c in T.Parallel(block_tokens, num_columns):
                    d_z[t, c] = T.if_then_else(
                        c < m,
                        d_pre[first + t, c],
                        T.if_then_else(c < 2 * m, d_post[first + t, c - m], d_comb[first + t, c - 2 * m])
                        if has_comb
                        else d_post[first + t, c - m],
                    )
                for t, c in T.Parallel(block_tokens, num_columns):
                    s[t, c] = sigmoid(mixes[t, c] * mhc_scale[T.min(c // m, 2)] + mhc_base[c])
                for t, c in T.Parallel(block_tokens, num_columns):
                    s[t, c] = s[t, c] * (T.float32(1) - s[t, c])
                for t, c in T.Parallel(block_tokens, num_columns):
                    factor = T.if_then_else(c < m, T.float32(1), post_mult_value)
                    d_z[t, c] *= T.if_then_else(c < 2 * m, factor * s[t, c], T.float32(1))
                add_to_sums(d_z, mixes, base_sums, scale_sums)
                for t, c in T.Parallel(block_tokens, num_columns):
                    d_z[t, c] *= mhc_scale[T.min(c // m, 2)]
                T.copy(d_z, d_mixes[first : first + block_tokens, :])

            store_sums(base_sums, scale_sums, groups, sums, token_range)

    return mhc_pre_split_mixes_bwd


@op(aligned=("d_pre", "d_post", "d_comb", "input_mixes", "mhc_base"))
def mhc_pre_split_mixes_bwd(
    d_pre: Tensor,
    d_post: Tensor,
    d_comb: Tensor | None,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `mhc_pre_split_mixes` by mixes, scale and base.

    With z = mixes · scale + base and s = sigmoid(z): d_z is d_pre · s(1 - s), d_post · post_mult_value · s(1 - s) and
    d_comb; d_mixes = d_z · scale, d_scale = Σ d_z · mixes and d_base = Σ d_z over tokens. The sums are float64, of 128
    ranges of tokens, so their bits are the same on any number of SMs; those of no tokens are zeros.
    Source: arXiv 2512.24880.

    Args:
        d_pre: float32 (..., m, 1), contiguous.
        d_post: float32 (..., m, 1), contiguous.
        d_comb: float32 (..., m, m), contiguous; None where the mixes have no comb.
        input_mixes: float32 (..., m·(m + 2)), or (..., 2m) without comb; contiguous, as the forward was given it.
        mhc_scale: float32 (3), or (2) without comb.
        mhc_base: float32 (m·(m + 2)), or (2m) without comb.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        mhc_post_mult_value: factor of the second group's sigmoids.

    Returns:
        d_mixes, d_scale, d_base: float32, of the shapes of input_mixes, mhc_scale and mhc_base.

    Raises:
        TypeError: an argument is not a tensor of its dtype, or not a number.
        ValueError: a shape, stride or device does not fit, m is none of these, or the number is not finite.
    """
    leading, has_comb = check_mixes(input_mixes, mhc_scale, mhc_base, mhc_mult)
    dtypes, device = (torch.float32,), input_mixes.device
    check.tensor("d_pre", d_pre, dtypes, (*leading, mhc_mult, 1), device=device)
    check.tensor("d_post", d_post, dtypes, (*leading, mhc_mult, 1), device=device)
    if has_comb:
        check.tensor("d_comb", d_comb, dtypes, (*leading, mhc_mult, mhc_mult), device=device)
    else:
        check.require(d_comb is None, "d_comb", "None, as the mixes have no comb", "a tensor")
    check.number("mhc_post_mult_value", mhc_post_mult_value)
    d_mixes = new(input_mixes.new_empty, input_mixes.shape)
    d_scale, d_base = new(input_mixes.new_empty, mhc_scale.shape), new(input_mixes.new_empty, mhc_base.shape)
    if not launching(d_mixes, d_scale, d_base):
        return d_mixes, d_scale, d_base
    if d_mixes.numel() == 0:
        return d_mixes, d_scale.zero_(), d_base.zero_()
    arch = get_arch(device)
    num_scales, num_columns = mhc_scale.shape[0], mhc_base.shape[0]
    sums = input_mixes.new_empty((NUM_RANGES, num_scales + num_columns), dtype=torch.float64)
    gradients = [None if d is None else flat(d, 2).flatten(1) for d in (d_pre, d_post, d_comb)]
    backward = _mhc_pre_split_mixes_bwd_kernel(mhc_mult, has_comb, arch)
    backward(*gradients, flat(input_mixes, 1), mhc_scale, mhc_base, flat(d_mixes, 1), sums, float(mhc_post_mult_value))
    sum_ranges_kernel(num_scales, num_columns, arch)(sums, d_scale, d_base)
    return d_mixes, d_scale, d_base
