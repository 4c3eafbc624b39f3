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
    size, pitch = T.dynamic("size", "int64"), T.dynamic("pitch", "int64")

    @T.prim_func
    def gather(
        flat: T.Tensor((size,), "int32"),
        ends: T.Tensor((num_groups,), "int32"),
        out: T.StridedTensor((rows, words), (pitch, 1), "int32"),
    ) -> None:
        with T.Kernel(T.ceildiv(rows, ROWS), T.truncdiv(words, _WORDS), threads=256) as (block, step):
            # The first group that ends behind the step: its number, and where it begins and ends.
            group = T.alloc_local((3,), "int32")
            k, channel = words * 4, step * BLOCK_K
            low, high = T.alloc_var("int32"), T.alloc_var("int32")
            low = 0
            high = num_groups
            while low < high:
                middle = (low + high) >> 1
                if group_end(ends[middle], k) > channel:
                    high = middle
                else:
                    low = middle + 1
            group[0] = low
            group[1] = 0
            group[2] = 0
            if low < num_groups:
                group[2] = group_end(ends[low], k)
                if low > 0:
                    group[1] = group_end(ends[low - 1], k)
            T.assume(pitch % _WORDS == 0)
            if group[0] < num_groups:
                first, num_steps = T.truncdiv(group[1], BLOCK_K), T.truncdiv(group[2] - group[1], BLOCK_K)
                for i, j in T.Parallel(ROWS, _WORDS):
                    if block * ROWS + i < rows:
                        row = T.cast(block * ROWS + i, "int64")
                        begin = T.cast(first, "int64") * rows + row * num_steps + (step - first)
                        out[row, step * _WORDS + j] = flat[begin * _WORDS + j]

    return gather
