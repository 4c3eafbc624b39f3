"""indexer_k_quant_and_cache: index keys are rotated, transformed, cast and written to their slots in a paged cache.

    x = k, or bf16(k) if there is a step before the cast
        rope      the channels of a pair, x0 and x1, become bf16(x0 · cos - x1 · sin), bf16(x1 · cos + x0 · sin)
        Hadamard  bf16(H x · float32(D^-½)), H by butterflies of strides 1, 2, 4, …
    e4m3      sf = amax / 448;  data = e4m3(x · (448 / amax))
      "ue8m0" sf = the least power of two from there on;  data = e4m3(x / sf)
    e2m1      of each 32 channels: sf = the least power of two from amax / 6 on;  data = e2m1(x / sf)

    slot s = slot_mapping[t] is key o = s % block_kv of block s // block_kv:

        block   │ data of key 0 │ key 1 │ … │ key block_kv - 1 │ sf of key 0 │ sf of key 1 │ … │     bytes
                  n = D, or D / 2, bytes each: o · n             4 each: block_kv · n + 4 · o

Four lanes take a key, a thread block 32 keys: `lib/row_steps.py` shows which channels a lane has.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, op
from tk_core.scales import LIMITS
from tk_indexer.lib.paged_cache import SF_BYTES, block_bytes, bytes_of_key, check_cache
from tk_indexer.lib.rows import DIMS, FP4_GROUP, ROPE_DIM, Transform, check_rope

_THREADS = 128
# Each access is clamped or guarded here.
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}


@kernel(pass_configs=_PASS_CONFIGS)
def _indexer_k_quant_and_cache_kernel(
    dtype: torch.dtype,
    alignment: int,
    dim: int,
    block_kv: int,
    fmt: str,
    round_sf: bool,
    transform: Transform,
    arch: Arch,
) -> Any:
    """Build `cast(k, slots, positions, table, cache, least_amax)`; without rope, positions and table are None."""
    import tilelang.language as T

    from tk_indexer.lib import row_steps as steps

    num_tokens, num_blocks, num_positions = (T.dynamic(name) for name in ("num_tokens", "num_blocks", "num_positions"))
    k_stride, cache_stride = (T.dynamic(name, "int64") for name in ("k_stride", "cache_stride"))
    rows, key_bytes = _THREADS // steps.LANES, bytes_of_key(dim, fmt == "e2m1")
    table_dtype = transform.table_dtype or torch.float32
    in_pairs = fmt == "e2m1" and (dtype == torch.bfloat16 or transform.in_bf16) and not arch.has_fp4_convert

    @T.prim_func
    def cast(
        k: T.StridedTensor((num_tokens, dim), (k_stride, 1), T.dtype(dtype)),
        slots: T.Tensor((num_tokens,), "int64"),
        positions: T.Tensor((num_tokens,), "int64"),
        table: T.Tensor((num_positions, ROPE_DIM), T.dtype(table_dtype)),
        cache: T.StridedTensor((num_blocks, block_kv * (key_bytes + SF_BYTES)), (cache_stride, 1), "uint8"),
        least_amax: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=_THREADS) as block:
            T.assume(k_stride % (alignment // dtype.itemsize) == 0)
            thread = T.get_thread_binding()
            # Past the last token, lanes repeat it, as they exchange values, and store nothing.
            token = T.min(block * rows + thread // steps.LANES, num_tokens - 1)
            slot = T.alloc_var("int64")
            slot = slots[token]
            values = steps.transformed_row(k, (token,), table, positions, transform, alignment)
            factors = steps.factors_of_row(values, fmt, round_sf, least_amax)
            is_slot = slot >= 0 and slot < T.cast(num_blocks, "int64") * block_kv
            if is_slot and block * rows + thread // steps.LANES < num_tokens:
                page, key = T.cast(slot // block_kv, "int32"), T.cast(slot % block_kv, "int32")
                steps.store_codes(values, factors, fmt, in_pairs, cache, (page,), key * key_bytes)
                if thread % steps.LANES == 0:
                    T.stg32(cache[page, block_kv * key_bytes + key * SF_BYTES], steps.sf_word(factors, fmt))

    return cast


@op(writes=("kv_cache",), aligned=("kv_cache", "cos_sin_cache"), min_sm=90)
def indexer_k_quant_and_cache(
    k: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    *,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    rope_first: bool = True,
    is_neox: bool = True,
    hadamard: bool = False,
) -> None:
    """Cast index keys to e4m3 or FP4, each with its factors, and write them to their slots in a paged cache.

    With positions, 64 channels are rotated first: x0 * cos - x1 * sin and x1 * cos + x0 * sin in float32, each product
    rounded; then, with `hadamard`, the row is multiplied by the Hadamard matrix in natural order, by butterflies of
    strides 1, 2, 4, ... in float32, and by float32(D ** -0.5). Before, and after each step, values are rounded to
    bfloat16. Then sf and data are those of tk_quant.per_token_cast with groups of quant_block_size: exact, with groups
    of D to e4m3, amax at least 1e-4, with groups of 32 to e2m1, amax at least 6 * 2 ** -126.

    A block's bytes are first the data of all its keys, then the factors of each key, four bytes: a float32, or for e2m1
    a byte b for each 32 channels, 2 ** (b - 127), 255 where the group has NaN or infinity (its data are unspecified
    then), and zeros. Nothing else in the cache changes. Two tokens with one slot leave either's key, or parts of both.
    Nothing is read back to the host. With TK_DEBUG=1, slots and positions that are too large raise. Name and arguments
    before the `*` are vLLM's; it divides by sf where scale_fmt is not "ue8m0", and 0.1 % of its bytes are others then.

    Args:
        k: bfloat16 or float32 (T, D), rows may be strided; D is 32, 64 or 128.
        kv_cache: uint8 (num_blocks, block_kv, W), or (num_blocks, block_kv, 1, W): written. W is D + 4, for e2m1
            D / 2 + 4; block_kv is 32, 64 or 128; blocks may lie further apart, by a multiple of 16 bytes.
        slot_mapping: int64 (T), contiguous: block * block_kv + key of the block. A key whose slot is negative or too
            large is not written.
        quant_block_size: Channels that share a factor: D for e4m3; 32, with D of 64 or 128, for e2m1.
        scale_fmt: "ue8m0": factors are powers of two; None or "", for e4m3 only: they are amax / 448.
        positions: int64 (T), contiguous, with cos_sin_cache, for D of 64 or 128; clamped to 0 ... P - 1.
        cos_sin_cache: float32 or bfloat16 (P, 64), contiguous: 32 cosines, then 32 sines.
        rope_first: Whether the first 64 channels are rotated, else the last.
        is_neox: Whether channel i is paired with i + 32, else 2i with 2i + 1.
        hadamard: Whether the row is transformed.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, a stride, a device or a number is out of range, or only one of positions and cos_sin_cache
            is given.
        UnsupportedArchError: The GPU is older than sm_90.
    """
    num_tokens, dim = check.tensor("k", k, (torch.bfloat16, torch.float32), ("T", "D"), layout="rows")
    check.one_of("k (D)", dim, DIMS)
    check.integer("quant_block_size", quant_block_size)
    is_size = quant_block_size in (FP4_GROUP, dim)
    check.require(is_size, "quant_block_size", "32 or {}, the channels of k", quant_block_size, dim)
    fmt = "e4m3" if quant_block_size == dim else "e2m1"
    width = bytes_of_key(dim, fmt == "e2m1") + SF_BYTES
    num_blocks, block_kv, _ = check_cache("kv_cache", kv_cache, width, k.device)
    check.tensor("slot_mapping", slot_mapping, (torch.int64,), (num_tokens,), device=k.device)
    check.below("slot_mapping", slot_mapping, num_blocks * block_kv, "slots below {}")
    check.one_of("scale_fmt", scale_fmt, ("ue8m0", "", None) if fmt == "e4m3" else ("ue8m0",))
    for name, flag in (("rope_first", rope_first), ("is_neox", is_neox), ("hadamard", hadamard)):
        check.flag(name, flag)
    check_rope(positions, cos_sin_cache, num_tokens, k)
    if launching(kv_cache) and num_tokens:
        transform = Transform.of(cos_sin_cache, rope_first, is_neox, hadamard)
        key = k.dtype, check.row_alignment(k), dim, block_kv, fmt, scale_fmt == "ue8m0", transform
        launch = _indexer_k_quant_and_cache_kernel(*key, get_arch(k.device))
        launch(k, slot_mapping, positions, cos_sin_cache, block_bytes(kv_cache), LIMITS[fmt][1])
