"""The kernel on Blackwell of an expert's first FP8 product with SwiGLU and the cast to e4m3: packed UE8M0 throughout.

As fp8_product_blackwell.py, for tiles of 128 × 256: 128 columns of the gate and the same 128 of up, each with sums of
its own. A thread stores a row, and reads its sums twice, for amax and for the codes: with the 128 outputs kept in
between, it would run out of registers.

The kernel is compiled for sm_100a and sm_103a, and has not run: there was no such GPU.
"""

from typing import Any, Literal

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.lib.fp8_product import PASS_CONFIGS
from tk_gemm.lib.fp8_product_blackwell import BLOCK, PIECE
from tk_gemm.lib.fp8_product_config import BLOCK_K

_NUM_STAGES = 4
BLOCK_N = 2 * BLOCK
"""Columns of a tile: gate and up."""


@kernel(pass_configs=PASS_CONFIGS)
def fp8_swiglu_product_blackwell_kernel(
    kind: Literal["ids", "psum"], with_weights: bool, with_clamp: bool, arch: Arch
) -> Any:
    """As fp8_product_blackwell_kernel, of interleaved B (groups, 2 · I, K), to data (M, I) and factors (words, 4 · M).

    Four bytes of factors are the word of a row, for 512 columns.
    """
    import tilelang.language as T

    from tk_gemm.lib import fp8_product_blackwell_steps as own
    from tk_gemm.lib import fp8_product_steps as steps
    from tk_gemm.lib import swiglu_steps as swiglu
    from tk_gemm.lib.fp8_product_steps import A_GROUP, PLACE_SIZE, ROW

    m, n, k, num_groups, num_cols = (T.dynamic(x) for x in ("m", "n", "k", "num_groups", "num_cols"))
    num_words, num_b_factors, layout_size = (T.dynamic(x) for x in ("num_words", "num_b_factors", "layout_size"))
    num_sf_words, num_weights = T.dynamic("num_sf_words"), T.dynamic("num_weights")
    num_sf_bytes = T.dynamic("num_sf_bytes", "int64")
    names = ("a", "b", "a_sf", "b_sf")
    strides = {x: steps.strides(x) for x in names}

    @T.prim_func
    def product(
        a: T.StridedTensor((1, m, k), (*strides["a"], 1), "float8_e4m3fn"),
        a_sf: T.StridedTensor((1, num_words, m), (*strides["a_sf"], 1), "int32"),
        b: T.StridedTensor((num_groups, n, k), (*strides["b"], 1), "float8_e4m3fn"),
        b_sf: T.StridedTensor(
            (num_groups, num_words, num_b_factors), (*strides["b_sf"], steps.stride("b_sf_row_stride")), "int32"
        ),
        layout: T.Tensor((layout_size,), "int32"),
        pos: T.Tensor((m,), "int32"),
        weights: T.Tensor((num_weights,), "float32"),
        data: T.Tensor((m, num_cols), "float8_e4m3fn"),
        sf: T.StridedTensor((num_sf_words, num_sf_bytes), (steps.stride("sf_stride"), 1), "uint8"),
        clamp: T.float32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=256) as block:
            a_tile = T.alloc_shared((_NUM_STAGES, BLOCK, BLOCK_K), "float8_e4m3fn")
            b_tile = T.alloc_shared((_NUM_STAGES, BLOCK_N, BLOCK_K), "float8_e4m3fn")
            a_words = T.alloc_shared((_NUM_STAGES, BLOCK), "int32")
            gate_words = T.alloc_shared((_NUM_STAGES, BLOCK), "int32")
            up_words = T.alloc_shared((_NUM_STAGES, BLOCK), "int32")
            gate_sums = T.alloc_tmem([BLOCK, BLOCK], "float32")
            up_sums = T.alloc_tmem([BLOCK, BLOCK], "float32")
            a_factors = T.alloc_tmem([BLOCK, 4], "int32")
            gate_factors = T.alloc_tmem([BLOCK, 4], "int32")
            up_factors = T.alloc_tmem([BLOCK, 4], "int32")
            full = T.alloc_barrier([1] * _NUM_STAGES)
            arranged = T.alloc_barrier([32] * _NUM_STAGES)
            empty = T.alloc_barrier([1] * _NUM_STAGES)
            summed = T.alloc_barrier([1])
            taken = T.alloc_barrier([128])
            place = T.alloc_local((PLACE_SIZE,), "int32")
            total = T.alloc_local((1,), "int32")
            tile = T.alloc_local((1,), "int32")
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            turn = T.alloc_local((1,), "int32")  # Parity of the number of tiles that are done.
            T.clear(slot)
            T.clear(turn)
            T.clear(place)
            num_steps = T.ceildiv(k, BLOCK_K)
            steps.num_tiles(kind, layout, m, n, 1, BLOCK, BLOCK_N, total)
            tile[0] = block
            thread = T.get_thread_binding()
            steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_groups, BLOCK, BLOCK_N, place)
            while tile[0] < total[0]:
                if thread < 32:
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                        if step % 4 == 0:
                            own.load_words(a_sf, a_words, full, slot[0], place[A_GROUP], place[ROW], step)
                        steps.load(a, b, a_tile, b_tile, full, slot[0], place, step)
                        steps.next_slot(slot, _NUM_STAGES)
                elif thread < 64:
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        if step % 4 == 0:
                            own.arrange(a_words, slot[0])
                            own.repeat_word(b_sf, gate_words, slot[0], place, n, 0, step)
                            own.repeat_word(b_sf, up_words, slot[0], place, n, BLOCK, step)
                            T.fence_proxy_async()
                        T.mbarrier_arrive(arranged[slot[0]])
                        steps.next_slot(slot, _NUM_STAGES)
                elif thread < 96:
                    T.mbarrier_wait_parity(taken, turn[0] ^ 1)
                    for step in T.serial(num_steps):
                        T.mbarrier_wait_parity(full[slot[0]], slot[1])
                        T.mbarrier_wait_parity(arranged[slot[0]], slot[1])
                        if step % 4 == 0:
                            T.tcgen05_cp_warpx4(a_words[slot[0], :], a_factors)
                            T.tcgen05_cp_warpx4(gate_words[slot[0], :], gate_factors)
                            T.tcgen05_cp_warpx4(up_words[slot[0], :], up_factors)
                        halves = ((0, gate_sums, gate_factors, None), (BLOCK, up_sums, up_factors, empty))
                        for first, sums, factors, done in halves:
                            both = (a_factors, factors)
                            own.multiply(a_tile, b_tile, first, sums, both, slot[0], step, step == 0, done)
                        steps.next_slot(slot, _NUM_STAGES)
                    T.tcgen05_mma_arrive(summed)
                elif thread >= 128:
                    gate = T.alloc_fragment((BLOCK, PIECE), "float32")
                    up = T.alloc_fragment((BLOCK, PIECE), "float32")
                    is_row = T.alloc_fragment((BLOCK,), "int32")
                    weight = T.alloc_fragment((BLOCK,), "float32")
                    amax = T.alloc_fragment((BLOCK,), "int32")
                    scale = T.alloc_fragment((BLOCK,), "float32")
                    steps.find_rows(kind, layout, m, place, is_row)
                    if with_weights:
                        swiglu.find_weights(pos, weights, m, num_weights, place, is_row, weight)
                    T.mbarrier_wait_parity(summed, turn[0])
                    T.clear(amax)
                    for first in T.unroll(0, BLOCK, PIECE):
                        T.copy(gate_sums[:, first : first + PIECE], gate)
                        T.copy(up_sums[:, first : first + PIECE], up)
                        swiglu.activate(gate, up, weight if with_weights else None, clamp if with_clamp else None)
                        swiglu.raise_amax(gate, up, amax)
                    swiglu.write_exponents(amax, is_row, scale, sf, m, place)
                    for first in T.unroll(0, BLOCK, PIECE):
                        T.copy(gate_sums[:, first : first + PIECE], gate)
                        T.copy(up_sums[:, first : first + PIECE], up)
                        swiglu.activate(gate, up, weight if with_weights else None, clamp if with_clamp else None)
                        swiglu.write_codes(gate, is_row, scale, data, m, place, first)
                    T.mbarrier_arrive(taken)
                turn[0] = turn[0] ^ 1
                tile[0] = tile[0] + num_blocks
                steps.find_tile(kind, tile, num_blocks, total[0], layout, m, n, num_groups, BLOCK, BLOCK_N, place)
            T.sync_threads()  # The first warp is done before the others, and then frees tensor memory.

    return product
