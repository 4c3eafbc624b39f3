"""gather_groups_kernel: copy an operand whose groups along K are matrices of their own into one matrix.

    flat    [ rows × K_0 ][ rows × K_1 ] …    one contiguous matrix after the other
    out     [ rows × (K_0 | K_1 | …) ]        one TMA descriptor can load from it: all groups have the same row stride

A thread block copies 128 channels of 64 rows. It reads and writes whole rows of 128 bytes.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.kernels import BLOCK_K

_WORDS = BLOCK_K // 4
ROWS = 64


@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def gather_groups_kernel(arch: Arch) -> Any:
    """Copy e4m3 data, four as an int32: flat (rows · K / 4,) to out (rows, K / 4); `ends` (groups) as in the product.

    Channels of out past the last group are not written.
    """
    import tilelang.language as T

    from tk_gemm.scheduler import group_end

    rows, words, num_groups = (T.dynamic(x) for x in ("rows", "words", "num_groups"))
    size = T.dynamic("size", "int64")

    @T.prim_func
    def gather(
        flat: T.Tensor((size,), "int32"), ends: T.Tensor((num_groups,), "int32"), out: T.Tensor((rows, words), "int32")
    ) -> None:
        with T.Kernel(T.ceildiv(rows, ROWS), T.truncdiv(words, _WORDS), threads=256) as (block, step):
            # The first group that ends behind the step, if one does, and where it begins and ends, in steps.
            group, high, first, end = (T.alloc_var("int32", init=0) for _ in range(4))
            high = num_groups
            while group < high:
                middle = (group + high) >> 1
                if group_end(ends[middle], words * 4) > step * BLOCK_K:
                    high = middle
                else:
                    group = middle + 1
            T.assume(words % _WORDS == 0)
            if group < num_groups:
                if group > 0:
                    first = T.truncdiv(group_end(ends[group - 1], words * 4), BLOCK_K)
                end = T.truncdiv(group_end(ends[group], words * 4), BLOCK_K)
                for i, j in T.Parallel(ROWS, _WORDS):
                    if block * ROWS + i < rows:
                        row = T.cast(block * ROWS + i, "int64")
                        begin = T.cast(first, "int64") * rows + row * (end - first) + (step - first)
                        out[row, step * _WORDS + j] = flat[begin * _WORDS + j]

    return gather
