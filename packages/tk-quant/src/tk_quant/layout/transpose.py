"""transpose: out[n, m] = x[m, n]; batched_transpose: out[b, n, m] = x[b, m, n].

Shapes (num_rows, num_cols) → (num_cols, num_rows), with a leading batch dimension in the batched form. Any dtype of 1,
2 or 4 bytes; num_rows and num_cols are multiples of 16, rows of x may be strided.

A tile goes through shared memory in chunks of 16 bytes, 8 chunks or more of as many rows as 8 chunks have elements:

      x: a chunk a thread                     shared memory                    out: a chunk a thread
        ┌────┬────┬─  ─┬────┐          a lane takes 4 bytes of `side`            ┌────┬────┬─  ─┬────┐
        │ t0 │ t1 │ …  │ t15│          rows, and turns them in registers         │ t0 │ t1 │ …  │ t7 │
        ├────┼────┼─  ─┼────┤    ──►   into 16 bytes (`side` elements) of   ──►  ├────┼────┼─  ─┼────┤
        │ t16│ t17│ …  │ t31│          4, 2 or 1 columns                         │ t8 │ t9 │ …  │ t15│
        └────┴────┴─  ─┴────┘                                                    └────┴────┴─  ─┴────┘
    a warp loads 256 contiguous bytes                                 and stores 128 contiguous bytes
    of 2 rows at a time,                                              of 4 columns at a time.

Chunk k of a row in the s-th `side` rows of a tile lies at k ^ (s % 8), so that neither side meets a bank twice.

Few blocks share a multiprocessor, so that reads and writes stay close to the order of addresses; to keep memory busy
all the same, each brings the tile of a later block into L2.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.bits import byte_perm
from tk_core.device.memory import prefetch_line
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.device.async_copy import copy_async, wait_for_copies

_DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8, torch.bool),
    *(torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    *(torch.float32, torch.int32, torch.uint32),
)


@dataclass(frozen=True)
class TransposeConfig:
    """Launch knobs: the size of a tile, and the threads that work on it."""

    groups: int
    """Groups of `side` rows in a tile, a multiple of 8."""
    chunks: int
    """Chunks of 16 bytes in a row of a tile, a multiple of 8."""
    threads: int
    blocks: int
    """Blocks that share a multiprocessor. More tiles under way than memory needs only slow it down."""
    ahead: int
    """How many blocks later the tile is loaded that a block brings into L2; 0 for none."""

    @staticmethod
    @cache
    def best(itemsize: int, num_cols: int, arch: Arch) -> "TransposeConfig":
        """The configuration for an input's element size and columns on an architecture."""
        # H200, 8192 x 7168, against copies of 56.9 and 28.7 µs: bf16 58.2 µs (58.6 and 59.5 with 3 and 4 blocks), e4m3
        # 29.9 (30.05 with 4 blocks; with 4096 columns 18.0 instead of 17.8). With short rows of single bytes most tiles
        # are under way at once, and waiting for a turn would cost up to 8 %.
        if itemsize == 1 and num_cols < 4096:
            return TransposeConfig(groups=8, chunks=16, threads=128, blocks=6, ahead=0)
        if itemsize == 1:
            blocks = 3 if num_cols > 4096 else 4
            return TransposeConfig(groups=8, chunks=16, threads=128, blocks=blocks, ahead=arch.num_sms)
        return TransposeConfig(groups=16, chunks=16, threads=256, blocks=2 if itemsize == 2 else 3, ahead=arch.num_sms)


# Chunks are whole, so the guards around them are all the bounds checking there is to do.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _transpose_kernel(
    num_cols: int, dtype: torch.dtype, alignment: int, batched: bool, config: TransposeConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    itemsize = dtype.itemsize
    side, per_word = 16 // itemsize, 4 // itemsize
    groups, chunks, threads = config.groups, config.chunks, config.threads
    tile_rows, tile_cols = groups * side, chunks * side
    lines = tile_rows * chunks // 8  # of 128 bytes
    col_tiles = ceil_div(num_cols, tile_cols)
    # A tile keeps as much shared memory as there is for one of `blocks`, 1 KB of which the driver takes.
    kept_rows = max(tile_rows, ((arch.max_shared_memory + 1024) // config.blocks - 1024) // (chunks * 16))
    element = T.dtype(dtype)
    batch, num_rows = T.dynamic("batch"), T.dynamic("num_rows")
    batch_stride, row_stride = T.dynamic("batch_stride"), T.dynamic("row_stride")
    row_tiles = T.ceildiv(num_rows, tile_rows)

    @T.macro
    def copy(x: T.Buffer, tile: T.Buffer, row: T.int32, chunk: T.int32, x_at: tuple, wanted: T.bool) -> None:
        place = (chunk ^ (row // side % 8)) * 4
        if alignment >= 4:
            for i in T.unroll(16 // alignment):
                copy_async(
                    T.access_ptr(tile[row, place + i * (alignment // 4)], "w"),
                    T.access_ptr(x[(*x_at[:-1], x_at[-1] + i * (alignment // itemsize))], "r"),
                    wanted,
                    alignment,
                )
        elif wanted:
            elements = T.view(tile, (kept_rows, tile_cols), element)
            for i in T.unroll(side):
                elements[row, place * per_word + i] = x[(*x_at[:-1], x_at[-1] + i)]

    @T.macro
    def turn(words: T.Buffer, turned: T.Buffer) -> None:
        pairs = T.alloc_local((4,), "uint32")
        for i in T.unroll(4):
            if itemsize == 4:
                turned[0, i] = words[i]
            elif itemsize == 2:
                for j in T.unroll(2):
                    turned[j, i] = byte_perm(words[2 * i], words[2 * i + 1], 0x5410 + 0x2222 * j)
            else:
                for j in T.unroll(4):  # columns 0 and 1 of rows 0 and 1, then of rows 2 and 3, then columns 2 and 3
                    first = 4 * i + j % 2 * 2
                    pairs[j] = byte_perm(words[first], words[first + 1], 0x5140 + 0x2222 * (j // 2))
                for j in T.unroll(4):
                    turned[j, i] = byte_perm(pairs[j // 2 * 2], pairs[j // 2 * 2 + 1], 0x5410 + 0x2222 * (j % 2))

    @T.macro
    def transpose_tile(x: T.Buffer, out: T.Buffer, row_tile: T.int32, col_tile: T.int32, prefix: tuple) -> None:
        # Checked by the op: what vector accesses need to know of the strides.
        T.assume(num_rows % 16 == 0)
        T.assume(row_stride % max(alignment // itemsize, 1) == 0)
        T.assume(batch_stride % max(alignment // itemsize, 1) == 0)
        thread = T.get_thread_binding()
        tile = T.alloc_shared((kept_rows, chunks * 4), "uint32")
        for i in T.unroll(tile_rows * chunks // threads):
            row = (i * threads + thread) // chunks
            chunk = (i * threads + thread) % chunks
            x_row, x_col = row_tile * tile_rows + row, col_tile * tile_cols + chunk * side
            copy(x, tile, row, chunk, (*prefix, x_row, x_col), x_row < num_rows and x_col < num_cols)
        if config.ahead:
            later = T.alloc_var("int32")
            later = col_tile * row_tiles + row_tile + config.ahead
            for i in T.unroll(ceil_div(lines, threads)):
                row = T.truncmod(later, row_tiles) * tile_rows + (i * threads + thread) // (chunks // 8)
                col = T.truncdiv(later, row_tiles) * tile_cols + (i * threads + thread) % (chunks // 8) * (8 * side)
                if i * threads + thread < lines and row < num_rows and col < num_cols:
                    prefetch_line(T.access_ptr(x[(*prefix, row, col)], "r"))
        wait_for_copies()
        T.sync_threads()
        lane = thread % 32
        words = T.alloc_local((side,), "uint32")
        turned = T.alloc_local((per_word, 4), "uint32")
        for i in T.unroll(groups * chunks * 4 // threads):
            turn_of_warp = i * (threads // 32) + thread // 32
            group = turn_of_warp % (groups // 8) * 8 + lane % 8
            chunk = turn_of_warp // (groups // 8)
            row = row_tile * tile_rows + group * side
            col = col_tile * tile_cols + chunk * side + lane // 8 * per_word
            if row < num_rows and col < num_cols:
                for j in T.unroll(side):
                    words[j] = tile[group * side + j, (chunk ^ (group % 8)) * 4 + lane // 8]
                turn(words, turned)
                for j in T.unroll(per_word):
                    T.stg128(out[(*prefix, col + j, row)], turned[j, 0:4])

    if batched:

        @T.prim_func
        def batched_transpose(
            x: T.StridedTensor((batch, num_rows, num_cols), (batch_stride, row_stride, 1), element),
            out: T.Tensor((batch, num_cols, num_rows), element),
        ) -> None:
            with T.Kernel(row_tiles * col_tiles * batch, threads=threads) as block:
                # Variables, for TileLang would divide anew at each use.
                row_tile, other = T.alloc_var("int32"), T.alloc_var("int32")
                row_tile = T.truncmod(block, row_tiles)
                other = T.truncdiv(block, row_tiles)
                transpose_tile(x, out, row_tile, T.truncmod(other, col_tiles), (T.truncdiv(other, col_tiles),))

        return batched_transpose

    @T.prim_func
    def transpose(
        x: T.StridedTensor((num_rows, num_cols), (row_stride, 1), element),
        out: T.Tensor((num_cols, num_rows), element),
    ) -> None:
        with T.Kernel(row_tiles, col_tiles, threads=threads) as (row_tile, col_tile):
            transpose_tile(x, out, row_tile, col_tile, ())

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
    config = TransposeConfig.best(dtype.itemsize, num_cols, arch)
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
