"""group_maps_kernel: a tensor map for each group along K where the operands of groups lie one after the other.

    flat     [ rows × K_0 ][ rows × K_1 ] …    one contiguous matrix after the other
    map g           | 0 … first … end |        rows K_g apart; from channel `first` on the matrix, before it others

So a tile's coordinates are those in an operand (rows, ΣK), and past the group's end TMA fills with zeros.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_gemm.kernels import BLOCK_K, PASS_CONFIGS


@kernel(pass_configs=PASS_CONFIGS)
def group_maps_kernel(block_m: int, block_n: int, arch: Arch) -> Any:
    """Write the maps of A's and of B's groups, for tiles of block_m and block_n rows; `ends` as in the product.

    A and B are e4m3 (M, ΣK) and (N, ΣK), but for the order of their elements.
    """
    import tilelang.language as T

    from tk_gemm.device import tensor_maps
    from tk_gemm.scheduler import group_end

    m, n, k, num_groups = (T.dynamic(x) for x in ("m", "n", "k", "num_groups"))

    @T.macro
    def write(group: T.PrimExpr, x: T.Buffer, block_rows: int, ends: T.Buffer, maps: T.Buffer) -> None:
        first, end = T.if_then_else(group > 0, group_end(ends[group - 1], k), 0), group_end(ends[group], k)
        # Row r's channel k is at first · rows + r · K_g + k - first. A group without channels is only loaded past ΣK.
        begin = T.cast(first, "int64") * (x.shape[0] - 1)
        like, row_bytes = tensor_maps.bytes_map(x, (block_rows, BLOCK_K)), T.max(end - first, BLOCK_K)
        tensor_maps.write(maps[group, :], like, T.address_of(x[0, begin]), T.max(end, BLOCK_K), row_bytes)

    @T.prim_func
    def group_maps(
        a: T.Tensor((m, k), "float8_e4m3fn"),
        b: T.Tensor((n, k), "float8_e4m3fn"),
        ends: T.Tensor((num_groups,), "int32"),
        a_maps: T.Tensor((num_groups, 16), "int64"),
        b_maps: T.Tensor((num_groups, 16), "int64"),
    ) -> None:
        with T.Kernel(num_groups, 2, threads=32) as (group, side):
            if side == 0:
                write(group, a, block_m, ends, a_maps)
            else:
                write(group, b, block_n, ends, b_maps)

    return group_maps
