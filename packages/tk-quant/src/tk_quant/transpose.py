"""transpose: out[n, m] = x[m, n]; batched_transpose: out[b, n, m] = x[b, m, n].

Shapes (num_rows, num_cols) → (num_cols, num_rows), with a leading batch dimension in the batched form. Any dtype of 1,
2 or 4 bytes; num_rows and num_cols are multiples of 16, rows of x may be strided.

A thread owns a square of 16 bytes by as many rows, transposes it in registers and needs no shared memory:

            4 lanes × 16 bytes of columns                  8 lanes × 16 bytes of rows
            ┌────┬────┬────┬────┐                          ┌────┬────┬─  ─┬────┐
    8 lanes │ t0 │ t1 │ t2 │ t3 │  side rows each          │ t0 │ t4 │ …  │ t28│  side columns each
    of rows ├────┼────┼────┼────┤            ──►           ├────┼────┼─  ─┼────┤
            │ t4 │ t5 │ t6 │ t7 │                          │ t1 │ t5 │ …  │ t29│
            └────┴────┴────┴────┘                          └────┴────┴─  ─┴────┘
    a warp loads 64 contiguous bytes of 8 rows             and stores 128 contiguous bytes of 4 columns at a time.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable

_DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8, torch.bool),
    *(torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    *(torch.float32, torch.int32, torch.uint32),
)


@dataclass(frozen=True, eq=False)
class TransposeConfig:
    """Launch knobs: how the lanes of a warp and the warps of a block are laid over its tile, and which tile is next."""

    lanes_of_cols: int
    warps_of_rows: int
    warps_of_cols: int
    rows_first: bool
    """Whether neighbouring blocks take neighbouring rows, rather than columns, of x."""

    @staticmethod
    @cache
    def best(itemsize: int, arch: Arch) -> "TransposeConfig":
        """The configuration for an input's element size on an architecture."""
        # H200, 8192 x 7168, against a copy of 57.3 and 29.3 µs: bf16 61.2 µs with 2 x 8 warps of 4 lanes (62.3 with
        # 4 x 2 of 8), e4m3 32.5 µs with 1 x 2 warps of 8 lanes (33.1 with 4). Columns first was never better by 0.5 µs.
        if itemsize == 1:
            return TransposeConfig(lanes_of_cols=8, warps_of_rows=1, warps_of_cols=2, rows_first=True)
        return TransposeConfig(lanes_of_cols=4, warps_of_rows=2, warps_of_cols=8, rows_first=True)


# Squares are whole, so the guard around a thread's square is all the bounds checking there is to do.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _transpose_kernel(
    num_cols: int, dtype: torch.dtype, alignment: int, batched: bool, config: TransposeConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    itemsize = dtype.itemsize
    side = 16 // itemsize
    load_lanes = max(alignment // itemsize, 1)
    lanes_of_cols, lanes_of_rows = config.lanes_of_cols, 32 // config.lanes_of_cols
    tile_rows = config.warps_of_rows * lanes_of_rows * side
    tile_cols = config.warps_of_cols * lanes_of_cols * side
    threads = 32 * config.warps_of_rows * config.warps_of_cols
    element = T.dtype(dtype)
    batch, num_rows = T.dynamic("batch"), T.dynamic("num_rows")
    batch_stride, row_stride = T.dynamic("batch_stride"), T.dynamic("row_stride")

    @T.macro
    def transpose_tile(x: T.Buffer, out: T.Buffer, tile_row: T.int32, tile_col: T.int32, prefix: tuple) -> None:
        # Checked by the op: what vector accesses need to know of the strides.
        T.assume(num_rows % 16 == 0)
        T.assume(row_stride % load_lanes == 0)
        T.assume(batch_stride % load_lanes == 0)
        thread = T.get_thread_binding()
        lane = thread % 32
        warp = thread // 32
        row = tile_row + ((warp // config.warps_of_cols) * lanes_of_rows + lane // lanes_of_cols) * side
        col = tile_col + ((warp % config.warps_of_cols) * lanes_of_cols + lane % lanes_of_cols) * side
        square = T.alloc_local((side, side), element)
        turned = T.alloc_local((side, side), element)
        if row < num_rows and col < num_cols:
            for i in T.unroll(side):
                for j in T.unroll(side // load_lanes):
                    for k in T.vectorized(load_lanes):
                        square[i, j * load_lanes + k] = x[(*prefix, row + i, col + j * load_lanes + k)]
            for i in T.unroll(side):
                for j in T.unroll(side):
                    turned[j, i] = square[i, j]
            words = T.view(turned, (side, 4), "uint32")
            for j in T.unroll(side):
                T.stg128(out[(*prefix, col + j, row)], words[j, 0:4])

    row_tiles, col_tiles = T.ceildiv(num_rows, tile_rows), T.ceildiv(num_cols, tile_cols)
    grid = (row_tiles, col_tiles) if config.rows_first else (col_tiles, row_tiles)

    if batched:

        @T.prim_func
        def batched_transpose(
            x: T.StridedTensor((batch, num_rows, num_cols), (batch_stride, row_stride, 1), element),
            out: T.Tensor((batch, num_cols, num_rows), element),
        ) -> None:
            with T.Kernel(*grid, batch, threads=threads) as (first, second, matrix):
                row_tile, col_tile = (first, second) if config.rows_first else (second, first)
                transpose_tile(x, out, row_tile * tile_rows, col_tile * tile_cols, (matrix,))

        return batched_transpose

    @T.prim_func
    def transpose(
        x: T.StridedTensor((num_rows, num_cols), (row_stride, 1), element),
        out: T.Tensor((num_cols, num_rows), element),
    ) -> None:
        with T.Kernel(*grid, threads=threads) as (first, second):
            row_tile, col_tile = (first, second) if config.rows_first else (second, first)
            transpose_tile(x, out, row_tile * tile_rows, col_tile * tile_cols, ())

    return transpose


def _transpose_reference(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.transpose(-2, -1))


@op("tk_quant::transpose_out", mutates=("out",), reference=_transpose_reference)
def _transpose_out(x: torch.Tensor, out: torch.Tensor) -> None:
    if out.numel() == 0:
        return
    if x.dtype == torch.bool:  # TileLang has no vectors of bool
        x, out = x.view(torch.uint8), out.view(torch.uint8)
    num_cols, dtype = x.shape[-1], x.dtype
    arch = get_arch(x.device)
    config = TransposeConfig.best(dtype.itemsize, arch)
    _transpose_kernel(num_cols, dtype, check.row_alignment(x), x.ndim == 3, config, arch)(x, out)


@replayable
def transpose(x: torch.Tensor) -> torch.Tensor:
    """Transpose a matrix.

    Args:
        x: (num_rows, num_cols), any dtype of 1, 2 or 4 bytes; both sizes multiples of 16, rows may be strided.

    Returns:
        (num_cols, num_rows), contiguous, same dtype: out[n, m] = x[m, n].

    Raises:
        TypeError: x is no tensor, or its dtype has another size.
        ValueError: x has another rank, a size that is no multiple of 16, or columns that are not contiguous.
    """
    num_rows, num_cols = check.tensor("x", x, _DTYPES, ("num_rows", "num_cols"), layout="rows")
    check.multiple_of("x.shape[0]", num_rows, 16)
    check.multiple_of("x.shape[1]", num_cols, 16)
    out = x.new_empty((num_cols, num_rows))
    _transpose_out(x, out)
    return out


@replayable
def batched_transpose(x: torch.Tensor) -> torch.Tensor:
    """Transpose each matrix of a batch.

    Args:
        x: (batch, num_rows, num_cols), any dtype of 1, 2 or 4 bytes; num_rows and num_cols multiples of 16; rows and
            batches may be strided.

    Returns:
        (batch, num_cols, num_rows), contiguous, same dtype: out[b, n, m] = x[b, m, n].

    Raises:
        TypeError: x is no tensor, or its dtype has another size.
        ValueError: x has another rank, a row or column count that is no multiple of 16, or columns that are not
            contiguous.
    """
    batch, num_rows, num_cols = check.tensor("x", x, _DTYPES, ("batch", "num_rows", "num_cols"), layout="rows")
    check.multiple_of("x.shape[1]", num_rows, 16)
    check.multiple_of("x.shape[2]", num_cols, 16)
    out = x.new_empty((batch, num_cols, num_rows))
    _transpose_out(x, out)
    return out
