"""The projection's kernel on Hopper: warps in roles, so that loads, conversions and products run at the same time.

    load        one warp        a step's x, 64 tokens × up to 256 channels of bfloat16, and its weights, by TMA
    convert     four warps      float32 weights → high and low parts; not for weights that are converted already
    multiply    four warps      x · highᵀ + x · lowᵀ on tensor cores, and x's squares meanwhile

Tiles pass from role to role through rings in shared memory.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_mhc.lib.projection_config import CHANNEL_BLOCK, Output, ProjectionConfig, Weights, padded_rows

_ROLE_BARRIER = 4
"""Named barrier of the multiplying warps; TileLang takes 1 to 3 itself."""


def _schedule(num_warps: int, rings: dict[str, tuple[list[Any], int]], is_normed: bool, writes_at_end: bool) -> Any:
    """Each role's operations in a step and in the whole kernel. `rings`: tiles, and how many there are of each."""
    import tilelang.language as T

    sync = T.WSSync
    fetched, loads = ("fn", ["load_fn"]) if "fn" in rings else ("parts", ["load_high", "load_low"])
    if is_normed:
        loads.append("load_weight")
    load = [sync.producer_acquire(fetched), *loads, sync.producer_commit(fetched)]
    load += [sync.producer_acquire("x"), "load_x", sync.producer_commit("x")]
    multiply = [sync.consumer_wait("x"), sync.consumer_wait("parts"), "high", "low", "square", "wait"]
    multiply += [sync.consumer_release("parts"), sync.consumer_release("x"), "end_split"]
    steps = {"load": load, "multiply": multiply}
    if "fn" in rings:
        convert = [sync.consumer_wait("fn"), sync.producer_acquire("parts"), "convert"]
        steps["convert"] = [*convert, sync.consumer_release("fn"), sync.producer_commit("parts")]
    whole: dict[str, list[Any]] = {role: ["steps"] for role in steps}
    whole["multiply"] = ["clear", "steps", *(["write"] if writes_at_end else [])]
    warps = {"load": (0, 1), "convert": (4, 8), "multiply": (num_warps - 4, num_warps)}
    return T.WSSchedule(
        num_warps=num_warps,
        roles=[T.WSRole(role, warps_lo=warps[role][0], warps_hi=warps[role][1]) for role in steps],
        pipelines=[T.WSPipeline(name, tiles, depth=depth) for name, (tiles, depth) in rings.items()],
        scopes=[T.WSScope("steps", steps), T.WSScope(T.WSScope.ROOT, whole)],
    )


@kernel(pass_configs={"tl.disable_thread_storage_sync": True})
def project_wgmma_kernel(
    num_rows: int,
    width: int,
    n_splits: int,
    num_rms_groups: int,
    weights: Weights,
    output: Output,
    config: ProjectionConfig,
    arch: Arch,
) -> Any:
    """The product of x (num_tokens, width) and fn (num_rows, width), of each rms group of channels on its own.

    With output "partials" a thread block takes `splits` of the splits, otherwise all of them. TileLang's own barriers
    are off: the roles need only those of the rings, and one at the end.
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tk_mhc.lib.projection_tiles import SplitSteps, add_squares, convert_weights, write_squares, write_sums

    block_tokens, block_channels = config.block_tokens, config.block_channels
    group_width = width // num_rms_groups
    steps = SplitSteps(n_splits, group_width // CHANNEL_BLOCK, block_channels // CHANNEL_BLOCK)
    product_rows = padded_rows(num_rows)
    num_partials = n_splits if output == "partials" else 1
    num_tokens = T.dynamic("num_tokens")
    is_converted, is_normed = weights == "parts", weights == "normed"
    num_warps = 8 if is_converted else 12

    def op(name: str) -> dict[str, str]:
        return {T.WSID: name}

    def step_of(worker: Any, splits: Any, step: Any = 0) -> Any:
        """A worker's step, counted from the first channels of the rms group on."""
        return steps.first(T.min(worker * splits, n_splits)) + step

    def channels(group: Any, worker: Any, splits: Any, step: Any) -> slice:
        first, end = (group * group_width + (step_of(worker, splits, step) + i) * block_channels for i in (0, 1))
        return slice(first, end)

    @T.prim_func
    def project(
        x: T.Tensor((num_tokens, width), "bfloat16"),
        fn: T.Tensor((num_rows, width), "float32"),
        fn_parts: T.Tensor((2, num_rows, width), "bfloat16"),
        norm_weight: T.Tensor((width,), "float32"),
        mul: T.Tensor((num_partials, num_tokens, num_rms_groups * num_rows), "float32"),
        sqrsum: T.Tensor((num_partials, num_tokens * num_rms_groups), "float32"),
        eps: T.float32,
        splits: T.int32,
    ) -> None:
        num_tiles, num_workers = T.ceildiv(num_tokens, block_tokens), T.ceildiv(n_splits, splits)
        with T.Kernel(num_tiles, num_workers, num_rms_groups, threads=num_warps * 32) as (tile, worker, group):
            x_tile = T.alloc_shared((block_tokens, block_channels), "bfloat16")
            fn_tile = T.alloc_shared((num_rows, block_channels), "float32")
            weight = T.alloc_shared((block_channels,), "float32")
            parts = T.alloc_shared((2, product_rows, block_channels), "bfloat16")
            product = T.alloc_fragment((block_tokens, product_rows), "float32")
            squares = T.alloc_fragment((block_tokens, CHANNEL_BLOCK), "float32")
            square_sum = T.alloc_fragment((block_tokens,), "float32")
            if output != "partials":
                sums = T.alloc_fragment((block_tokens, product_rows), "float32")
                rstd = T.alloc_shared((block_tokens,), "float32")

            T.annotate_layout({x_tile: make_swizzled_layout(x_tile)})
            rings = {"x": ([x_tile], config.num_stages)}
            rings["parts"] = ([parts], config.num_stages if is_converted else config.num_parts)
            if not is_converted:
                rings["fn"] = ([fn_tile, weight] if is_normed else [fn_tile], config.num_stages)
            T.annotate_ws_schedule(_schedule(num_warps, rings, is_normed, writes_at_end=output != "partials"))

            with T.ws_op("clear"):
                T.clear(product)
                T.clear(squares)
                T.clear(square_sum)
                if output != "partials":
                    T.clear(sums)
            num_steps = step_of(worker + 1, splits) - step_of(worker, splits)
            for step in T.serial(num_steps, annotations=op("steps")):
                if is_converted:
                    # TMA fills rows beyond fn's last with zeros; their part of the product is not read.
                    T.copy(
                        fn_parts[0, 0:product_rows, channels(group, worker, splits, step)],
                        parts[0, :, :],
                        annotations=op("load_high"),
                    )
                    T.copy(
                        fn_parts[1, 0:product_rows, channels(group, worker, splits, step)],
                        parts[1, :, :],
                        annotations=op("load_low"),
                    )
                else:
                    T.copy(fn[:, channels(group, worker, splits, step)], fn_tile, annotations=op("load_fn"))
                    if is_normed:
                        T.copy(
                            norm_weight[channels(group, worker, splits, step)], weight, annotations=op("load_weight")
                        )
                    with T.ws_op("convert"):
                        convert_weights(fn_tile, weight if is_normed else None, parts)
                T.copy(
                    x[tile * block_tokens : (tile + 1) * block_tokens, channels(group, worker, splits, step)],
                    x_tile,
                    annotations=op("load_x"),
                )
                T.wgmma_gemm(x_tile, parts[0, :, :], product, transpose_B=True, annotations=op("high"))
                T.wgmma_gemm(x_tile, parts[1, :, :], product, transpose_B=True, annotations=op("low"))
                with T.ws_op("square"):
                    add_squares(x_tile, squares)
                with T.ws_op("wait"):
                    T.wait_wgmma(0)
                with T.ws_op("end_split"):
                    if steps.ends_split(step_of(worker, splits, step)):
                        T.reduce_sum(squares, square_sum, dim=1, clear=False)
                        if output == "partials":
                            split = steps.done(step_of(worker, splits, step)) - 1
                            write_sums(product, mul, split, tile * block_tokens, group * num_rows, num_rows)
                            write_squares(square_sum, sqrsum, split, tile * block_tokens, group, num_rms_groups)
                            T.clear(square_sum)
                        else:
                            for i, j in T.Parallel(block_tokens, product_rows):
                                sums[i, j] = sums[i, j] + product[i, j]
                        T.clear(product)
                        T.clear(squares)

            if output != "partials":
                with T.ws_op("write"):
                    if output == "mixes":
                        for i in T.Parallel(block_tokens):
                            square_sum[i] = T.rsqrt(square_sum[i] / T.float32(group_width) + eps)
                        T.copy(square_sum, rstd)
                        T.sync_threads(_ROLE_BARRIER, 128)
                        for i, j in T.Parallel(block_tokens, product_rows):
                            sums[i, j] = sums[i, j] * rstd[i]
                    write_sums(sums, mul, 0, tile * block_tokens, group * num_rows, num_rows)
                    write_squares(square_sum, sqrsum, 0, tile * block_tokens, group, num_rms_groups)

    return project
