"""fused_indexer_q_rope_quant: index queries are rotated, transformed, cast to e4m3; their factors go into weights.

    each head of each token is a row: rope, Hadamard and cast as in indexer_k_quant_and_cache.py, with sf a power of two
    weights[t, h] = ((w[t, h] · sf) · softmax_scale) · head_scale, each product rounded to float32

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
from tk_indexer.lib.rows import DIMS, NUM_HEADS, ROPE_DIM, Transform, check_rope

_THREADS = 128
# Each access is clamped or guarded here.
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}


@kernel(pass_configs=_PASS_CONFIGS)
def _fused_indexer_q_rope_quant_kernel(
    num_heads: int, dim: int, alignment: int, weights_dtype: torch.dtype, transform: Transform, arch: Arch
) -> Any:
    """Without rope, positions and table are None."""
    import tilelang.language as T

    from tk_indexer.lib import row_steps as steps

    num_tokens, num_positions = T.dynamic("num_tokens"), T.dynamic("num_positions")
    strides = tuple(T.dynamic(name, "int64") for name in ("token_stride", "head_stride"))
    weights_stride = T.dynamic("weights_stride", "int64")
    rows = _THREADS // steps.LANES
    table_dtype = transform.table_dtype or torch.float32

    @T.prim_func
    def cast(
        positions: T.Tensor((num_tokens,), "int64"),
        q: T.StridedTensor((num_tokens, num_heads, dim), (*strides, 1), "bfloat16"),
        table: T.Tensor((num_positions, ROPE_DIM), T.dtype(table_dtype)),
        weights: T.StridedTensor((num_tokens, num_heads), (weights_stride, 1), T.dtype(weights_dtype)),
        out: T.Tensor((num_tokens, num_heads, dim), "float8_e4m3fn"),
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
            factors = steps.factors_of_row(values, True, least_amax)
            if row // num_heads < num_tokens:
                steps.store_codes(values, factors[1], out, (token, head), 0)
                if thread % steps.LANES == 0:
                    weight = T.cast(weights[token, head], "float32")
                    out_weights[token, head] = weight * factors[0] * softmax_scale * head_scale

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
) -> tuple[Tensor, Tensor]:
    """Cast index queries to e4m3, a factor for each head, and multiply the heads' weights by their factors.

    Each head of each token is rotated, transformed and cast exactly as a key is by `indexer_k_quant_and_cache` with
    scale_fmt "ue8m0". Then weights become ((w * sf) * softmax_scale) * head_scale, each product rounded to float32.
    With TK_DEBUG=1, positions that are too large raise. Name and arguments before the `*` are vLLM's. Queries in FP4
    are not taken yet.

    Args:
        positions: int64 (T), contiguous, for D of 64 or 128; clamped to 0 ... P - 1. None: nothing is rotated.
        q: bfloat16 (T, H, D), tokens and heads may be strided; H is 16, 32 or 64, D 32, 64 or 128.
        cos_sin_cache: float32 or bfloat16 (P, 64), contiguous: 32 cosines, then 32 sines; None without positions.
        weights: bfloat16 or float32 (T, H), rows may be strided.
        softmax_scale: Finite.
        head_scale: Finite.
        is_neox: Whether channel i is paired with i + 32, else 2i with 2i + 1.
        fmt: "e4m3".
        rope_first: Whether the first 64 channels are rotated, else the last.
        hadamard: Whether each head is multiplied by the Hadamard matrix.

    Returns:
        float8_e4m3fn (T, H, D) and float32 (T, H).

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
    check.one_of("fmt", fmt, ("e4m3",))
    for name, flag in (("is_neox", is_neox), ("rope_first", rope_first), ("hadamard", hadamard)):
        check.flag(name, flag)
    check_rope(positions, cos_sin_cache, num_tokens, q)
    out = new(q.new_empty, (num_tokens, num_heads, dim), dtype=torch.float8_e4m3fn)
    out_weights = new(q.new_empty, (num_tokens, num_heads), dtype=torch.float32)
    if launching(out, out_weights):
        transform = Transform.of(cos_sin_cache, rope_first, is_neox, hadamard)
        key = num_heads, dim, check.row_alignment(q), weights.dtype, transform
        launch = _fused_indexer_q_rope_quant_kernel(*key, get_arch(q.device))
        factors = float(softmax_scale), float(head_scale), LIMITS["e4m3"][1]
        launch(positions, q, cos_sin_cache, weights, out, out_weights, *factors)
    return out, out_weights
