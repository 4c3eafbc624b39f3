"""Tensor maps in global memory, by which TMA loads from matrices that only the device knows.

A map is 128 bytes on 128: a region of 16 int64, such as maps[group, :].
"""

import tilelang.language as T
from tvm.tirx import BufferRegion, PrimExpr

from tk_core.headers import Header
from tk_core.macros.ring import Ring

_TENSOR_MAPS = Header(__file__)
_UINT8, _NOT_INTERLEAVED, _SWIZZLE_128B, _L2_128B, _ZEROS = 0, 0, 3, 2, 0


def bytes_map(x: T.Buffer, box: tuple[int, int]) -> PrimExpr:
    """The map that TileLang makes to load tiles of `box` (rows, columns) bytes from x (rows, columns).

    Tiles lie in shared memory as the tensor core reads them: 128 columns, and swizzled.
    """
    (num_rows, num_cols), (row, col) = x.shape, box
    sizes = num_cols, num_rows, 1, num_cols, col, row, 1, 1  # Of x, its strides, the box, and the box's strides.
    return T.create_tma_descriptor(_UINT8, 2, x.data, *sizes, _NOT_INTERLEAVED, _SWIZZLE_128B, _L2_128B, _ZEROS)


def write(map: BufferRegion, like: PrimExpr, data: PrimExpr, num_cols: PrimExpr, row_bytes: PrimExpr) -> PrimExpr:
    """Write a map as `like`, but of `num_cols` bytes a row from the pointer `data` on, rows `row_bytes` apart.

    In thread blocks of one warp. Rows may overlap.
    """
    return _TENSOR_MAPS.call("void", "tk_write_map", T.access_ptr(map, "w"), like, data, num_cols, row_bytes)


def acquire(map: BufferRegion) -> PrimExpr:
    """See a map that another kernel wrote, before the warp's first load by it."""
    return _TENSOR_MAPS.call("void", "tk_acquire_map", T.access_ptr(map, "r"))


@T.macro
def load(r: Ring, map: BufferRegion, rows: slice, cols: slice, target: BufferRegion) -> None:
    """Begin to load a tile of bytes into the stage, as `ring.load`, but by a map."""
    num_bytes = (rows.stop - rows.start) * (cols.stop - cols.start)
    if T.shuffle_elect(32):
        T.mbarrier_expect_tx(r.full[r.stage[0]], num_bytes)
        place = r.full[r.stage[0]], T.access_ptr(target, "w"), cols.start, rows.start
        T.tma_load(_TENSOR_MAPS.call("handle", "tk_map", T.access_ptr(map, "r")), *place, 0)
