"""transpose: out[n, m] = x[m, n]; batched_transpose: out[b, n, m] = x[b, m, n].

Shapes (num_rows, num_cols) → (num_cols, num_rows), with a leading batch dimension in the batched form. Any dtype of 1,
2 or 4 bytes; num_rows and num_cols are multiples of 16, rows of x may be strided.

A tile goes through shared memory, and from there, transposed, through registers. A chunk is 16 bytes, `side` elements:

      x: a chunk a thread                     shared memory                    out: a chunk a thread
        ┌────┬────┬─  ─┬────┐            a thread reads a word of each           ┌────┬────┬─  ─┬────┐
        │ t0 │ t1 │ …  │ t15│            of `side` rows and makes the            │ t0 │ t1 │ …  │ t7 │
        ├────┼────┼─  ─┼────┤    ──►     chunks of 4, 2 or 1 columns of  ──►     ├────┼────┼─  ─┼────┤
        │ t16│ t17│ …  │ t31│            them                                    │ t8 │ t9 │ …  │ t15│
        └────┴────┴─  ─┴────┘                                                    └────┴────┴─  ─┴────┘
    a warp loads 256 contiguous bytes                                 and stores 128 contiguous bytes
    of 2 rows at a time,                                              of 4 columns at a time.

In shared memory chunk k of row r of a tile lies at k ^ (r / side % 8), so neither writes nor reads have bank conflicts.

Few thread blocks run on an SM at a time, so that reads and writes stay close to the order of addresses. To keep memory
busy all the same, each thread block prefetches the tile of a later one into L2.
"""

from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.bits import byte_perm
from tk_core.device.memory import prefetch_line
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

_DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8, torch.bool),
    *(torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    *(torch.float32, torch.int32, torch.uint32),
)

_MAX_BLOCKS = 65535
"""The most thread blocks in the second dimension of a grid (tiles along the columns) and the third (batch)."""


@dataclass(frozen=True)
class TransposeConfig:
    """Launch knobs: the size of a tile, and the threads that work on it."""

    groups: int
    """Groups of `side` rows in a tile, a multiple of 8."""
    chunks: int
    """Chunks of 16 bytes in a row of a tile, a multiple of 8."""
    threads: int
    blocks: int
    """Thread blocks on an SM at a time. More tiles in flight than memory needs only slow it down."""
    ahead: int
    """A thread block prefetches into L2 the tile of the thread block this many later; 0 for no prefetch."""

    @staticmethod
    @cache
    def best(itemsize: int, num_cols: int, arch: Arch) -> "TransposeConfig":
        """The configuration for an input's element size and columns on an architecture."""
        # H200, 8192 x 7168, against copies of 56.9 and 28.7 µs: bf16 58.2 µs (58.6 and 59.5 with 3 and 4 blocks), e4m3
        # 29.9 (30.05 with 4 blocks; but 4096 columns 17.8 with 4, 18.0 with 3). With short rows of single bytes most
        # tiles are in flight at once; fewer blocks, so that some tiles wait for their turn, would cost up to 8 %.
        if itemsize == 1 and num_cols < 4096:
            return TransposeConfig(groups=8, chunks=16, threads=128, blocks=6, ahead=0)
        if itemsize == 1:
            blocks = 3 if num_cols > 4096 else 4
            return TransposeConfig(groups=8, chunks=16, threads=128, blocks=blocks, ahead=arch.num_sms)
        return TransposeConfig(groups=16, chunks=16, threads=256, blocks=2 if itemsize == 2 else 3, ahead=arch.num_sms)


@kernel(pass_configs={**DIRECT_COPIES, "tl.enable_lower_ldgstg": True})
def _transpose_kernel(
    num_cols: int, dtype: torch.dtype, alignment: int, batched: bool, config: TransposeConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    itemsize, threads, warps = dtype.itemsize, config.threads, config.threads // 32
    side, per_word = 16 // itemsize, 4 // itemsize
    tile_rows, tile_cols, tile_words = config.groups * side, config.chunks * side, config.chunks * 4
    # A thread block takes all shared memory that it can have with `blocks` on an SM, so that no more run at a time.
    kept_rows = max(tile_rows, arch.shared_memory_each(config.blocks) // (config.chunks * 16))
    num_rows, row_stride = T.dynamic("num_rows"), T.dynamic("row_stride", "int64")
    batch, batch_stride = (T.dynamic("batch"), T.dynamic("batch_stride", "int64")) if batched else (1, 0)
    leading, leading_strides = ((batch,), (batch_stride,)) if batched else ((), ())
    row_tiles, col_tiles = T.ceildiv(num_rows, tile_rows), ceil_div(num_cols, tile_cols)

    def swizzled(row: Any, word: Any) -> tuple[Any, Any]:
        return row, (word // 4 ^ (row // side % 8)) * 4 + word % 4

    def of_warps(col: Any, group: Any, word: Any) -> tuple[Any, Any]:
        """(thread, register): a warp takes eight neighbouring groups of rows and all columns of a chunk."""
        turn = col // side * (config.groups // 8) + group // 8
        thread = turn % warps * 32 + col % side // per_word * 8 + group % 8
        return thread, (turn // warps * per_word + col % per_word) * 4 + word

    def words_of(x: T.Buffer) -> T.Buffer:
        shape, strides = (batch, num_rows, num_cols // per_word), (batch_stride // per_word, row_stride // per_word, 1)
        return T.view(x, shape, "uint32", strides=strides)

    def transposed_word(tile: T.Buffer, col: Any, row: Any) -> Any:
        """A word of the transposed tile: elements of column `col`, in rows from `row` on."""
        words = [tile[row + i, col // per_word] for i in range(per_word)]
        if itemsize == 4:
            return words[0]
        if itemsize == 2:
            return byte_perm(*words, 0x5410 + col % 2 * 0x2222)
        # Byte 0 of rows 0 and 1, and byte 1 of these; or bytes 2 and 3.
        selector = 0x5140 + col % 4 // 2 * 0x2222
        pairs = [byte_perm(*words[i : i + 2], selector) for i in (0, 2)]
        return byte_perm(*pairs, 0x5410 + col % 2 * 0x2222)

    @T.macro
    def load_tile(x: T.Buffer, tile: T.Buffer, index: T.int32, row: T.int32, col: T.int32) -> None:
        if alignment >= 4:
            words, word = words_of(x), col // per_word
            T.async_copy(words[index, row : row + tile_rows, word : word + tile_words], tile[0:tile_rows, :])
        else:
            elements = T.view(
                x, (batch, num_rows, num_cols), f"uint{8 * itemsize}", strides=(batch_stride, row_stride, 1)
            )
            for i, j in T.Parallel(tile_rows, tile_words):
                parts = [T.cast(elements[index, row + i, col + j * per_word + k], "uint32") for k in range(per_word)]
                shifted = [part << T.uint32(8 * itemsize * k) for k, part in enumerate(parts)]
                tile[i, j] = reduce(or_, shifted)

    @T.macro
    def prefetch_tile(x: T.Buffer, index: T.int32, row_tile: T.int32, col_tile: T.int32) -> None:
        """Prefetch into L2 the tile of the thread block `config.ahead` later, if that tile is in the same matrix."""
        words, later = words_of(x), T.alloc_var("int32")
        later = col_tile * row_tiles + row_tile + config.ahead
        for i, j in T.Parallel(tile_rows, config.chunks // 8):
            row = T.truncmod(later, row_tiles) * tile_rows + i
            word = T.truncdiv(later, row_tiles) * tile_words + j * 32
            if row < num_rows and word < num_cols // per_word:
                prefetch_line(T.access_ptr(words[index, row, word], "r"))

    @T.prim_func
    def transpose(
        x: T.StridedTensor((*leading, num_rows, num_cols), (*leading_strides, row_stride, 1), T.dtype(dtype)),
        out: T.Tensor((*leading, num_cols, num_rows), T.dtype(dtype)),
    ) -> None:
        with T.Kernel(row_tiles, col_tiles, batch, threads=threads) as (row_tile, col_tile, index):
            # The op has checked the strides; vector accesses need to know.
            T.assume(row_stride % max(alignment // itemsize, 1) == 0)
            T.assume(batch_stride % max(alignment // itemsize, 1) == 0)
            tile = T.alloc_shared((kept_rows, tile_words), "uint32")
            transposed = T.alloc_fragment((tile_cols, config.groups, 4), "uint32")
            T.annotate_layout({tile: T.Layout(tile.shape, swizzled)})
            T.annotate_layout({transposed: T.Fragment(transposed.shape, forward_fn=of_warps)})

            col, group = col_tile * tile_cols, row_tile * config.groups
            load_tile(x, tile, index, row_tile * tile_rows, col)
            if config.ahead and alignment >= 4:  # else rows are not at whole words
                prefetch_tile(x, index, row_tile, col_tile)
            T.ptx_wait_group(0)
            for i, j, k in T.Parallel(*transposed.shape):
                transposed[i, j, k] = transposed_word(tile, i, j * side + k * per_word)
            # num_rows is a multiple of 16.
            chunks = T.Tensor((batch, num_cols, num_rows // side, 4), "uint32", out.data)
            T.copy(transposed, chunks[index, col : col + tile_cols, group : group + config.groups, :])

    return transpose


def _launch(x: Tensor, out: Tensor) -> None:
    if x.dtype == torch.bool:  # TileLang has no vectors of bool
        x, out = x.view(torch.uint8), out.view(torch.uint8)
    arch = get_arch(x.device)
    config = TransposeConfig.best(x.dtype.itemsize, x.shape[-1], arch)
    most_cols = _MAX_BLOCKS * config.chunks * (16 // x.dtype.itemsize)
    parts = [(x, out)]
    if x.shape[-1] > most_cols:
        matrices = parts if x.ndim == 2 else zip(x, out, strict=True)
        parts = [
            part
            for matrix, transposed in matrices
            for part in zip(matrix.split(most_cols, 1), transposed.split(most_cols), strict=True)
        ]
    elif x.ndim == 3 and x.shape[0] > _MAX_BLOCKS:
        parts = zip(x.split(_MAX_BLOCKS), out.split(_MAX_BLOCKS), strict=True)
    for x, out in parts:
        _transpose_kernel(x.shape[-1], x.dtype, check.row_alignment(x), x.ndim == 3, config, arch)(x, out)


@op(aligned=())
def transpose(x: Tensor) -> Tensor:
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
    out = new(x.new_empty, (num_cols, num_rows))
    if launching(out):
        _launch(x, out)
    return out


@op(aligned=())
def batched_transpose(x: Tensor) -> Tensor:
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
    out = new(x.new_empty, (batch, num_cols, num_rows))
    if launching(out):
        _launch(x, out)
    return out
