"""fused_indexer_q_rope_quant: index queries are rotated, transformed, cast; the factors of e4m3 go into the weights.

    each head of each token is a row: rope, Hadamard and cast as in indexer_k_quant_and_cache.py, with sf a power of two
    weights[t, h] = ((w[t, h] · sf) · softmax_scale) · head_scale, each product rounded to float32; e2m1: without sf

Four lanes take a row, a thread block 32 rows, heads of a token one after another: `lib/row_steps.py` shows which
channels a lane has.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.scales import LIMITS
from tk_indexer.lib.rows import DIMS, FP4_DIMS, NUM_HEADS, ROPE_DIM, Transform, check_rope

_THREADS = 128
# Each access is clamped or guarded here.
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}


@kernel(pass_configs=_PASS_CONFIGS)
def _fused_indexer_q_rope_quant_kernel(
    num_heads: int, dim: int, alignment: int, weights_dtype: torch.dtype, fmt: str, transform: Transform, arch: Arch
) -> Any:
    """Without rope, positions and table are None; so is out_sf for e4m3."""
    import tilelang.language as T

    from tk_indexer.lib import row_steps as steps

    num_tokens, num_positions = T.dynamic("num_tokens"), T.dynamic("num_positions")
    strides = tuple(T.dynamic(name, "int64") for name in ("token_stride", "head_stride"))
    weights_stride = T.dynamic("weights_stride", "int64")
    rows = _THREADS // steps.LANES
    table_dtype = transform.table_dtype or torch.float32
    is_fp4 = fmt == "e2m1"

    @T.prim_func
    def cast(
        positions: T.Tensor((num_tokens,), "int64"),
        q: T.StridedTensor((num_tokens, num_heads, dim), (*strides, 1), "bfloat16"),
        table: T.Tensor((num_positions, ROPE_DIM), T.dtype(table_dtype)),
        weights: T.StridedTensor((num_tokens, num_heads), (weights_stride, 1), T.dtype(weights_dtype)),
        out: T.Tensor((num_tokens, num_heads, dim // 2 if is_fp4 else dim), "int8" if is_fp4 else "float8_e4m3fn"),
        out_sf: T.Tensor((num_tokens, num_heads), "int32"),
        out_weights: T.Tensor((num_tokens, num_heads), "float32"),
        softmax_scale: T.float32,
        head_scale: T.float32,
        least_amax: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens * num_heads, rows), threads=_THREADS) as block:
            T.assume(strides[0] % (alignment // 2) == 0)
            T.assume(strides[1] % (alignment // 2) == 0)
            thread = T.get_thread_binding()
            row = block * rows + thread // steps.LANES
            # Past the last token, lanes repeat it, as they exchange values, and store nothing.
            token, head = T.min(row // num_heads, num_tokens - 1), row % num_heads
            values = steps.transformed_row(q, (token, head), table, positions, transform, alignment)
            factors = steps.factors_of_row(values, fmt, True, least_amax)
            if row // num_heads < num_tokens:
                steps.store_codes(values, factors, fmt, is_fp4 and not arch.has_fp4_convert, out, (token, head), 0)
                if thread % steps.LANES == 0:
                    weight = T.cast(weights[token, head], "float32")
                    if is_fp4:
                        T.stg32(out_sf[token, head], steps.sf_word(factors, fmt))
                        out_weights[token, head] = weight * softmax_scale * head_scale
                    else:
                        out_weights[token, head] = weight * factors[0, 0] * softmax_scale * head_scale

    return cast


@op(aligned=("cos_sin_cache",), min_sm=90)
def fused_indexer_q_rope_quant(
    positions: Tensor | None,
    q: Tensor,
    cos_sin_cache: Tensor | None,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool = True,
    *,
    fmt: str = "e4m3",
    rope_first: bool = True,
    hadamard: bool = False,
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """Cast index queries to e4m3 or FP4, and multiply the heads' weights by what scores need beside them.

    Each head of each token is rotated, transformed and cast exactly as a key is by `indexer_k_quant_and_cache` with
    scale_fmt "ue8m0". Then weights become ((w * sf) * softmax_scale) * head_scale, each product rounded to float32;
    with e2m1, whose factors are the second of a pair, (w * softmax_scale) * head_scale. With TK_DEBUG=1, positions that
    are too large raise. Name and arguments before the `*` are vLLM's; `fused_indexer_q_rope_quant_v4` has those of its
    function for DeepSeek V4.

    Args:
        positions: int64 (T), contiguous, for D of 64 or 128; clamped to 0 ... P - 1. None: nothing is rotated.
        q: bfloat16 (T, H, D), tokens and heads may be strided; H is 16, 32 or 64, D 32, 64 or 128.
        cos_sin_cache: float32 or bfloat16 (P, 64), contiguous: 32 cosines, then 32 sines; None without positions.
        weights: bfloat16 or float32 (T, H), rows may be strided.
        softmax_scale: Finite.
        head_scale: Finite.
        is_neox: Whether channel i is paired with i + 32, else 2i with 2i + 1.
        fmt: "e4m3", or, with D of 64 or 128, "e2m1".
        rope_first: Whether the first 64 channels are rotated, else the last.
        hadamard: Whether each head is multiplied by the Hadamard matrix.

    Returns:
        `(q, weights)`: float8_e4m3fn (T, H, D), and float32 (T, H); with e2m1 `((q, sf), weights)`: int8 (T, H, D / 2),
        two codes a byte, the even channel in the low nibble, and int32 (T, H), byte b for channels 32 b … 32 b + 31.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride, a device or a number is out of range, or only one of positions and cos_sin_cache
            is given.
        UnsupportedArchError: The GPU is older than sm_90.
    """
    num_tokens, num_heads, dim = check.tensor("q", q, (torch.bfloat16,), ("T", "H", "D"), layout="rows")
    check.one_of("q (H)", num_heads, NUM_HEADS)
    check.one_of("q (D)", dim, DIMS)
    floats = torch.bfloat16, torch.float32
    check.tensor("weights", weights, floats, (num_tokens, num_heads), layout="rows", device=q.device)
    check.number("softmax_scale", softmax_scale)
    check.number("head_scale", head_scale)
    check.one_of("fmt", fmt, ("e4m3", "e2m1") if dim in FP4_DIMS else ("e4m3",))
    for name, flag in (("is_neox", is_neox), ("rope_first", rope_first), ("hadamard", hadamard)):
        check.flag(name, flag)
    check_rope(positions, cos_sin_cache, num_tokens, q)
    is_fp4, shape = fmt == "e2m1", (num_tokens, num_heads)
    data_type = torch.int8 if is_fp4 else torch.float8_e4m3fn
    out = new(q.new_empty, (*shape, dim // 2 if is_fp4 else dim), dtype=data_type)
    out_sf = new(q.new_empty, shape, dtype=torch.int32) if is_fp4 else None
    out_weights = new(q.new_empty, shape, dtype=torch.float32)
    if launching(out, out_sf, out_weights):
        transform = Transform.of(cos_sin_cache, rope_first, is_neox, hadamard)
        key = num_heads, dim, check.row_alignment(q), weights.dtype, fmt, transform
        launch = _fused_indexer_q_rope_quant_kernel(*key, get_arch(q.device))
        factors = float(softmax_scale), float(head_scale), LIMITS[fmt][1]
        launch(positions, q, cos_sin_cache, weights, out, out_sf, out_weights, *factors)
    return (out if out_sf is None else (out, out_sf)), out_weights


def fused_indexer_q_rope_quant_v4(
    positions: Tensor,
    q: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    use_fp4: bool = False,
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """`fused_indexer_q_rope_quant` by the arguments of vLLM's function for DeepSeek V4, which has the same name.

    The last 64 channels are rotated, 2i with 2i + 1. The same results and errors.
    """
    check.flag("use_fp4", use_fp4)
    operands = positions, q, cos_sin_cache, weights, softmax_scale, head_scale
    fmt = "e2m1" if use_fp4 else "e4m3"
    return fused_indexer_q_rope_quant(*operands, is_neox=False, fmt=fmt, rope_first=False)
