"""After receive_tokens: scale factors by columns, as tk-gemm reads them best.

receive_tokens writes a row's factors side by side. By columns each would be a store of 4 bytes far from the next.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel

_THREADS = 256
_TILE_BYTES = 64 << 10
"""Shared memory of a thread block, unless a row is longer."""


def block_rows(num_factors: int) -> int:
    """Rows of a thread block: 64, a multiple of a warp's stores, or fewer if they are long."""
    return max(1, min(64, _TILE_BYTES // (4 * (num_factors | 1))))


@kernel
def transpose_factors_kernel(num_factors: int, arch: Arch) -> Any:
    """Write `rows` to `columns`: the first counts[-1] + alignment - 1 of them, past which there are none."""
    import tilelang.language as T

    rows_each = block_rows(num_factors)
    num_rows, num_counts, col_stride = T.dynamic("num_rows"), T.dynamic("num_counts"), T.dynamic("col_stride", "int64")

    @T.prim_func
    def transpose_factors(
        rows: T.Tensor((num_rows, num_factors), "int32"),
        columns: T.StridedTensor((num_rows, num_factors), (1, col_stride), "int32"),
        counts: T.Tensor((num_counts,), "int32"),
        alignment: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_rows, rows_each), threads=_THREADS) as block:
            # A column more, so that threads that read a column meet different banks.
            tile = T.alloc_shared((rows_each, num_factors | 1), "int32")
            if block * rows_each < counts[num_counts - 1] + alignment - 1:
                for i, j in T.Parallel(rows_each, num_factors):
                    if block * rows_each + i < num_rows:
                        tile[i, j] = rows[block * rows_each + i, j]
                for j, i in T.Parallel(num_factors, rows_each):
                    if block * rows_each + i < num_rows:
                        columns[block * rows_each + i, j] = tile[i, j]

    return transpose_factors
