"""mhc_pre_split_mixes: the weights of streams from raw mixes.

    z[t, k] = mixes[t, k] · scale[group of k] + base[k]
    pre[t, i] = sigmoid(z[t, i]) + pre_eps
    post[t, i] = sigmoid(z[t, m + i]) · post_mult_value + post_eps
    comb[t, i, j] = z[t, 2m + i·m + j]

in float32. The groups are the first m columns, the next m and the last m²; without comb there are 2m columns. A thread
takes a token.
"""

from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_core.views import flat
from tk_mhc.lib.tokens import check_mixes, mix_counts


@kernel(pass_configs=DIRECT_COPIES)
def _mhc_pre_split_mixes_kernel(mhc_mult: int, has_comb: bool, has_post_eps: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.mixes import split_mixes, token_per_thread

    num_columns = mix_counts(mhc_mult)[0 if has_comb else 1]
    block_tokens = 32  # One warp, so that 8192 tokens reach all SMs. Untuned.
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_pre_split_mixes(
        input_mixes: T.Tensor((num_tokens, num_columns), "float32"),
        mhc_scale: T.Tensor((3 if has_comb else 2,), "float32"),
        mhc_base: T.Tensor((num_columns,), "float32"),
        pre: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        post: T.Tensor((num_tokens, mhc_mult, 1), "float32"),
        comb: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        post_mult_value: T.float32,
        pre_eps: T.float32,
        post_eps: T.float32 if has_post_eps else 0.0,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_tokens), threads=block_tokens) as block:
            first = block * block_tokens
            mixes = T.alloc_fragment((block_tokens, num_columns), "float32")
            block_pre = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            block_post = T.alloc_fragment((block_tokens, mhc_mult), "float32")
            block_comb = T.alloc_fragment((block_tokens, mhc_mult, mhc_mult), "float32") if has_comb else None
            fragments = (mixes, block_pre, block_post, *([block_comb] if has_comb else []))
            T.annotate_layout({x: token_per_thread(x.shape) for x in fragments})

            T.copy(input_mixes[first : first + block_tokens, :], mixes)
            numbers = (post_mult_value, pre_eps, post_eps if has_post_eps else None)
            split_mixes(mixes, mhc_scale, mhc_base, block_pre, block_post, block_comb, *numbers)
            T.copy(block_pre, pre[first : first + block_tokens, :, 0])
            T.copy(block_post, post[first : first + block_tokens, :, 0])
            if has_comb:
                T.copy(block_comb, comb[first : first + block_tokens, :, :])

    return mhc_pre_split_mixes


@op(aligned=("input_mixes", "mhc_base"))
def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    *,
    mhc_post_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split mixes into pre = sigmoid(z) + pre_eps, post = sigmoid(z) · post_mult_value and comb = z of three groups.

    z = mixes · scale + base in float32, with a scale for each group: the first m columns, the next m, the last m².
    Source: arXiv 2512.24880. comb is raw: `sinkhorn_normalize` comes next. A model that does not mix its streams
    (HY-V4) has the first two groups alone.

    Args:
        input_mixes: float32 (..., m·(m + 2)), or (..., 2m) without comb; contiguous, as `mhc_pre_norm_fn` returns it.
        mhc_scale: float32 (3), or (2) without comb.
        mhc_base: float32 (m·(m + 2)), or (2m) without comb.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        mhc_post_mult_value: factor of the second group's sigmoids.
        mhc_pre_eps: added to the first group's sigmoids.
        mhc_post_eps: added to post.

    Returns:
        pre and post float32 (..., m, 1), comb float32 (..., m, m), or None if there is none among the mixes.

    Raises:
        TypeError: an argument is not a tensor of its dtype, or not a number.
        ValueError: a shape, stride or device does not fit, m is none of these, or a number is not finite.
    """
    leading, has_comb = check_mixes(input_mixes, mhc_scale, mhc_base, mhc_mult)
    check.number("mhc_post_mult_value", mhc_post_mult_value)
    check.number("mhc_pre_eps", mhc_pre_eps)
    check.number("mhc_post_eps", mhc_post_eps)
    pre = new(input_mixes.new_empty, (*leading, mhc_mult, 1))
    post = new(input_mixes.new_empty, (*leading, mhc_mult, 1))
    comb = new(input_mixes.new_empty, (*leading, mhc_mult, mhc_mult)) if has_comb else None
    if launching(pre, post, comb):
        split = _mhc_pre_split_mixes_kernel(mhc_mult, has_comb, mhc_post_eps != 0, get_arch(input_mixes.device))
        results = (flat(pre, 2), flat(post, 2), flat(comb, 2) if has_comb else None)
        numbers = (float(mhc_post_mult_value), float(mhc_pre_eps), *([float(mhc_post_eps)] if mhc_post_eps else []))
        split(flat(input_mixes, 1), mhc_scale, mhc_base, *results, *numbers)
    return pre, post, comb
