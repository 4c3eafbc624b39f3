"""The router's product on Hopper: one loading warp, and warpgroups that split weights and multiply.

    load        one warp                64 channels of x and of float32 weights a step, by TMA, into a ring
    multiply    one or two warpgroups   64 experts each: weights from shared memory to registers, there split into
                                        three bfloat16 parts, and multiplied with the tokens in shared memory

The weights are the tensor core's first operand, which may come from registers, so their parts are never stored. One
warpgroup splits while the other multiplies. router_config.py has the order of the sums.
"""

from itertools import pairwise
from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.hopper.router_config import BANK_ROW, PADDING, RUN, RouterConfig
from tk_gemm.kernels import PASS_CONFIGS


@kernel(pass_configs=PASS_CONFIGS)
def router_kernel(config: RouterConfig, arch: Arch) -> Any:
    """out[part] = x · weightᵀ over the part's channels; shapes and the cut of K are known only at run time.

    There are `num_chunks` chunks in `num_pieces` parts of the output, which are chunks or groups of chunks.
    """
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    from tk_gemm.hopper import router_steps as steps

    block_n, block_m, output = config.block_experts, config.block_tokens, config.output
    num_stages, num_consumers = config.num_stages(arch), 2 * block_n
    m, n, k, num_parts = (T.dynamic(name) for name in ("m", "n", "k", "num_parts"))
    x_stride, weight_stride = T.dynamic("x_stride", "int64"), T.dynamic("weight_stride", "int64")
    part_stride, out_stride = T.dynamic("part_stride", "int64"), T.dynamic("out_stride", "int64")

    @T.prim_func
    def product(
        x: T.StridedTensor((m, k), (x_stride, 1), "bfloat16"),
        weight: T.StridedTensor((n, k), (weight_stride, 1), "float32"),
        out: T.StridedTensor((num_parts, m, n), (part_stride, out_stride, 1), "float32"),
        num_chunks: T.int32,
        num_pieces: T.int32,
        num_workers: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(n, block_n) * T.ceildiv(m, block_m), num_workers, threads=num_consumers + 128) as (
            tile,
            worker,
        ):
            w_tile = T.alloc_shared((num_stages, RUN // BANK_ROW, block_n, BANK_ROW), "float32")
            x_tile = T.alloc_shared((num_stages, block_m, RUN), "bfloat16")
            full = T.alloc_barrier([1] * num_stages)
            empty = T.alloc_barrier([num_consumers // 32] * num_stages)
            slot = T.alloc_local((2,), "int32")  # Stage of the ring, and the round's parity.
            expert, token, piece, end_piece = (T.alloc_var("int32") for _ in range(4))
            chunk, end_chunk, run, end_run = (T.alloc_var("int32") for _ in range(4))
            T.annotate_layout({w_tile: make_full_bank_swizzled_layout(w_tile)})
            T.clear(slot)
            expert = T.truncmod(tile, T.ceildiv(n, block_n)) * block_n
            token = T.truncdiv(tile, T.ceildiv(n, block_n)) * block_m
            piece = T.truncdiv(worker * num_pieces, num_workers)
            end_piece = T.truncdiv((worker + 1) * num_pieces, num_workers)
            chunk = T.truncdiv(piece * num_chunks, num_pieces)
            run = T.truncdiv(chunk * T.truncdiv(k, RUN), num_chunks)
            if T.get_thread_binding() < num_consumers:
                if block_n * block_m == 128 * 128:
                    T.set_max_nreg(232, 1)
                parts = [T.alloc_fragment((block_n, RUN), "bfloat16") for _ in range(3)]
                product_sums = T.alloc_fragment((block_n, block_m), "float32")
                sums = T.alloc_fragment((block_n, block_m), "float32")
                group_sums = T.alloc_shared((block_n, block_m + PADDING), "float32")
                while piece < end_piece:
                    first_chunk = T.alloc_var("int32")
                    first_chunk = chunk
                    end_chunk = T.truncdiv((piece + 1) * num_chunks, num_pieces)
                    while chunk < end_chunk:
                        end_run = T.truncdiv((chunk + 1) * T.truncdiv(k, RUN), num_chunks)
                        T.clear(sums)
                        while run < end_run:
                            T.mbarrier_wait_parity(full[slot[0]], slot[1])
                            steps.split(w_tile, slot[0], parts)
                            steps.multiply(x_tile, slot[0], parts, product_sums)
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive(empty[slot[0]])
                            steps.next_slot(slot, num_stages)
                            steps.add(sums, product_sums)
                            run += 1
                        if output != "chunks":
                            if chunk > first_chunk:
                                steps.add(sums, group_sums)
                            if chunk + 1 < end_chunk:
                                for i, j in T.Parallel(block_n, block_m):
                                    group_sums[i, j] = sums[i, j]
                        chunk += 1
                    steps.store(sums, out, piece, token, expert)
                    piece += 1
            else:
                if block_n * block_m == 128 * 128:
                    T.set_max_nreg(40, 0)
                if T.get_thread_binding() < num_consumers + 32:
                    end_run = T.truncdiv(
                        T.truncdiv(end_piece * num_chunks, num_pieces) * T.truncdiv(k, RUN), num_chunks
                    )
                    while run < end_run:
                        T.mbarrier_wait_parity(empty[slot[0]], slot[1] ^ 1)
                        steps.load(x, weight, x_tile, w_tile, full, slot[0], token, expert, run)
                        steps.next_slot(slot, num_stages)
                        run += 1

    return product


@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def sum_parts_kernel(num_parts: int, num_groups: int, arch: Arch) -> Any:
    """scores = the sums of chunks, those of a group in order, then those of the groups in order; or of groups alone.

    A thread takes four neighbours: the last dimension.
    """
    import tilelang.language as T

    m, num_quads = T.dynamic("m"), T.dynamic("num_quads")
    out_stride = T.dynamic("out_stride", "int64")
    firsts = [group * num_parts // num_groups for group in range(num_groups + 1)]
    order = [(first, part) for first, end in pairwise(firsts) for part in range(first + 1, end)]
    order += [(0, first) for first in firsts[1:-1]]

    @T.prim_func
    def sum_parts(
        parts: T.Tensor((num_parts, m, num_quads, 4), "float32"),
        scores: T.StridedTensor((m, num_quads, 4), (out_stride, 4, 1), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(m * num_quads, 128), threads=128) as block:
            values = T.alloc_local((num_parts, 4), "float32")
            token, quad = T.alloc_var("int32"), T.alloc_var("int32")
            T.assume(out_stride % 4 == 0)
            token = T.truncdiv(block * 128 + T.get_thread_binding(), num_quads)
            quad = T.truncmod(block * 128 + T.get_thread_binding(), num_quads)
            if token < m:
                for part in T.unroll(num_parts):
                    for v in T.vectorized(4):
                        values[part, v] = parts[part, token, quad, v]
                for into, part in order:
                    for v in T.unroll(4):
                        values[into, v] = values[into, v] + values[part, v]
                for v in T.vectorized(4):
                    scores[token, quad, v] = values[0, v]

    return sum_parts
