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
from tk_gemm.hopper.router_config import PADDING, RUN, RouterConfig
from tk_gemm.kernels import PASS_CONFIGS, stride


@kernel(pass_configs=PASS_CONFIGS)
def router_kernel(config: RouterConfig, arch: Arch) -> Any:
    """out[part] = x · weightᵀ over the part's channels; shapes and the cut of K are known only at run time.

    A part is a chunk or a group of chunks; a thread block computes its worker's share of the parts of one tile.
    """
    import tilelang.language as T

    from tk_core.macros import ring
    from tk_gemm.hopper import router_steps as steps
    from tk_gemm.hopper.router_steps import begin

    block_n, block_m, output = config.block_experts, config.block_tokens, config.output
    num_stages, num_consumers, moves_registers = config.num_stages(arch), 2 * block_n, block_n * block_m == 128 * 128
    m, n, k, num_parts = (T.dynamic(name) for name in ("m", "n", "k", "num_parts"))
    num_runs = T.truncdiv(k, RUN)

    @T.prim_func
    def product(
        x: T.StridedTensor((m, k), (stride("x_stride"), 1), "bfloat16"),
        weight: T.StridedTensor((n, k), (stride("weight_stride"), 1), "float32"),
        out: T.StridedTensor((num_parts, m, n), (stride("part_stride"), stride("out_stride"), 1), "float32"),
        num_chunks: T.int32,
        num_workers: T.int32,
    ) -> None:
        num_tiles = T.ceildiv(n, block_n) * T.ceildiv(m, block_m)
        with T.Kernel(num_tiles, num_workers, threads=num_consumers + 128) as (index, worker):
            stages = steps.stages(num_stages, block_m, block_n)
            r = ring.ring(num_stages, 1, num_consumers // 32)
            tile = steps.tile(index, n, block_m, block_n)
            first_part = begin(worker, num_parts, num_workers)
            end_part = begin(worker + 1, num_parts, num_workers)
            if T.get_thread_binding() < num_consumers:
                if moves_registers:
                    T.set_max_nreg(232, 1)
                weight_parts = [T.alloc_fragment((block_n, RUN), "bfloat16") for _ in range(3)]
                product_sums = T.alloc_fragment((block_n, block_m), "float32")
                sums = T.alloc_fragment((block_n, block_m), "float32")
                group_sums = T.alloc_shared((block_n, block_m + PADDING), "float32")
                for part in T.serial(first_part, end_part):
                    first_chunk = begin(part, num_chunks, num_parts)
                    end_chunk = begin(part + 1, num_chunks, num_parts)
                    for chunk in T.serial(first_chunk, end_chunk):
                        T.clear(sums)
                        for _ in T.serial(begin(chunk, num_runs, num_chunks), begin(chunk + 1, num_runs, num_chunks)):
                            ring.wait_full(r)
                            steps.split(stages.weight, r.stage[0], weight_parts)
                            steps.multiply(stages.x, r.stage[0], weight_parts, product_sums)
                            ring.release(r, r.stage[0])
                            ring.move_on(r)
                            steps.add(sums, product_sums)
                        if output == "groups":
                            if chunk > first_chunk:
                                steps.add(sums, group_sums)
                            if chunk + 1 < end_chunk:
                                T.copy(sums, group_sums[:, :block_m])
                    steps.store(sums, out, part, tile)
            else:
                if moves_registers:
                    T.set_max_nreg(40, 0)
                if T.get_thread_binding() < num_consumers + 32:
                    first_run = begin(begin(first_part, num_chunks, num_parts), num_runs, num_chunks)
                    end_run = begin(begin(end_part, num_chunks, num_parts), num_runs, num_chunks)
                    for run in T.serial(first_run, end_run):
                        steps.load(x, weight, tile, run, stages, r)

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
