"""engram_fetch: a gather of rows of all ranks' buffers by few SMs. Rows are too short for copy engines.

A rank's rows lie behind the flags, one after the other. Threads take vectors of 16 bytes of the result, several at
once, as a peer's memory is microseconds away.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_ep.symmetric import memory
from tk_ep.symmetric.kernels import PASS_CONFIGS

_THREADS = 512
_VECTORS = 4
"""A thread's loads under way."""


def num_blocks(num_units: int, most: int) -> int:
    """Thread blocks for a result of so many units."""
    return max(1, min(most, -(-num_units // (_THREADS * _VECTORS))))


@kernel(pass_configs=PASS_CONFIGS)
def fetch_kernel(num_ranks: int, row_units: int, arch: Arch) -> Any:
    """out is int32 (entries · row_units, 4). An index of no entry gets zeros."""
    import tilelang.language as T

    num_units = T.dynamic("num_units")

    @T.prim_func
    def fetch(
        indices: T.Tensor((T.dynamic("num_indices"),), "int32"),
        out: T.Tensor((T.dynamic("out_units"), 4), "int32"),
        total: T.int64,
        num_rows: T.int32,
        num_blocks: T.int32,
    ) -> None:
        peers = tuple(T.arg(f"peer_{r}", T.Tensor((num_units, 4), "int32")) for r in range(num_ranks))
        with T.Kernel(num_blocks, threads=_THREADS) as block:
            thread = T.get_thread_binding()
            first = T.alloc_var("int64")
            vectors = T.alloc_local((_VECTORS, 4), "int32")
            entries, owners, rows, units = (T.alloc_local((_VECTORS,), "int32") for _ in range(4))
            first = T.cast(block * _THREADS * _VECTORS + thread, "int64")
            while first < total:
                for j in T.unroll(_VECTORS):
                    entries[j] = -1
                    if first + j * _THREADS < total:
                        entries[j] = indices[T.truncdiv(first + j * _THREADS, row_units)]
                for j in T.unroll(_VECTORS):
                    for v in T.vectorized(4):
                        vectors[j, v] = 0
                    if entries[j] >= 0:
                        owners[j] = T.truncdiv(entries[j], num_rows)
                        rows[j] = entries[j] - owners[j] * num_rows
                        units[j] = T.cast(T.truncmod(first + j * _THREADS, row_units), "int32")
                        units[j] = memory.FIRST_ROW + rows[j] * row_units + units[j]
                        for r in tuple(range(num_ranks)):
                            if owners[j] == r:
                                for v in T.vectorized(4):
                                    vectors[j, v] = peers[r][units[j], v]
                for j in T.unroll(_VECTORS):
                    if first + j * _THREADS < total:
                        for v in T.vectorized(4):
                            out[first + j * _THREADS, v] = vectors[j, v]
                first = first + T.cast(num_blocks, "int64") * (_THREADS * _VECTORS)

    return fetch
