"""engram_lookup: for each n-gram and head a row of one large table.

    out[t, c] = table[indices[t, c]]                    a bfloat16 table, copied
    out[t, c] = bf16(float32(code · sf))                an e4m3 table, sf that of the row's group of 32 channels
    out[t, c] = 0                                       where the index is negative

Source: "Conditional Memory via Scalable Lookup" (Engram), arXiv 2601.07372; DeepSeek's V4.1 keeps e4m3 rows, 256 codes
and their 8 exponents side by side.

The table may lie in pinned host memory. The kernel then reads it in place over the bus, and is given addresses instead
of tensors, because TileLang's host code takes no tensors of the CPU.

A thread block takes some pairs (t, c), flat, and a piece of their rows. First come the indices, then all rows at once,
each thread eight neighbouring channels of several rows; 64-bit offsets:

    pair 0   table[idx 0]   [ thread 0 | thread 1 | … | thread 31 ]
    pair 1   table[idx 1]   [ thread 32 | … ]
    …
    pair 4   table[idx 4]   [ thread 0 | … ]            the second load in flight of these threads
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from tk_core import check, serving
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import given_or_new, launching, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_engram.lib.indices import check_indices, piece_channels

GROUP = 32
"""Channels that share a scale."""
_SF_DTYPES = (torch.uint8, torch.float32)


@kernel(pass_configs=DIRECT_COPIES)
def _engram_lookup_kernel(
    dim: int,
    dtype: torch.dtype,
    sf_dtype: torch.dtype | None,
    vector: int,
    is_pinned: bool,
    arch: Arch,
) -> Any:
    """`vector`: channels of one load, whose address is a multiple of its size in every row of the table."""
    import tilelang.language as T

    from tk_engram.lib.gate_tiles import pairs_of_threads

    threads, block_channels = 128, piece_channels(dim, 256)
    vectors = block_channels // VECTOR
    # Four loads in flight a thread where the width allows: 2 KB a warp of a bfloat16 table, to hide the latency.
    # 8192 tokens of 16 rows on an H200, 4, 8, 16, 32 and 64 rows a block: 36.9 µs, 34.8, 35.0, 35.3 and 35.6.
    fewest_pairs = threads // math.gcd(threads, vectors)  # that fill the threads evenly
    block_pairs = fewest_pairs * max(1, 4 * threads // (fewest_pairs * vectors))
    pieces, groups = dim // block_channels, block_channels // GROUP
    has_sf, has_exponents = sf_dtype is not None, sf_dtype is torch.uint8
    element, sf_element = T.dtype(dtype), T.dtype(sf_dtype or torch.uint8)
    # Widened at once: single codes, put together to a word, would go through local memory.
    found_element = "float32" if has_sf and vector < 4 else element
    num_pairs, num_rows = T.dynamic("num_pairs"), T.dynamic("num_rows", "int64")
    row_stride, sf_stride = T.dynamic("row_stride", "int64"), T.dynamic("sf_stride", "int64")
    shape, sf_shape = (num_rows, dim), (num_rows, dim // GROUP)

    @T.prim_func
    def engram_lookup(indices: T.Tensor((num_pairs,), "int32"), out: T.Tensor((num_pairs, dim), "bfloat16")) -> None:
        # The rest: tensors on the device; or addresses in host memory, with the sizes that tensors would bring along.
        if is_pinned:
            address = T.arg("table_address", T.dynamic("table_address", "int64"))
            T.arg("num_rows", num_rows)
            T.arg("row_stride", row_stride)
            if has_sf:
                sf_address = T.arg("sf_address", T.dynamic("sf_address", "int64"))
                T.arg("sf_stride", sf_stride)
        else:
            table = T.arg("table", T.StridedTensor(shape, (row_stride, 1), element))
            if has_sf:
                table_sf = T.arg("table_sf", T.StridedTensor(sf_shape, (sf_stride, 1), sf_element))

        with T.Kernel(T.ceildiv(num_pairs, block_pairs) * pieces, threads=threads) as block:
            T.assume(row_stride % vector == 0)
            if is_pinned:
                table = T.make_tensor_from_addr(address, shape, element, strides=(row_stride, 1))
                if has_sf:
                    table_sf = T.make_tensor_from_addr(sf_address, sf_shape, sf_element, strides=(sf_stride, 1))
            first, channel = block // pieces * block_pairs, block % pieces * block_channels
            end, end_channel = first + block_pairs, channel + block_channels
            rows = T.alloc_shared((block_pairs,), "int32")
            found = T.alloc_fragment((block_pairs, block_channels), found_element)
            values = T.alloc_fragment((block_pairs, block_channels), "bfloat16")
            T.annotate_layout({x: pairs_of_threads(x.shape, threads) for x in (found, values)})

            for i in T.Parallel(block_pairs):
                rows[i] = T.if_then_else(first + i < num_pairs, indices[first + i], -1)
            # TileLang adds the condition that the row is below num_rows.
            for i, j in T.Parallel(block_pairs, block_channels):
                found[i, j] = T.if_then_else(
                    rows[i] >= 0, T.cast(table[rows[i], channel + j], found_element), T.cast(0, found_element)
                )
            if has_sf:
                sf = T.alloc_fragment((block_pairs, groups), sf_element)
                scales = T.alloc_fragment((block_pairs, groups), "float32")
                for i, g in T.Parallel(block_pairs, groups):
                    sf[i, g] = T.if_then_else(
                        rows[i] >= 0, table_sf[rows[i], channel // GROUP + g], T.cast(0, sf_element)
                    )
                if has_exponents:
                    for i, g in T.Parallel(block_pairs, groups):
                        exponent = T.cast(sf[i, g], "uint32")
                        # 2^-127, a subnormal number, and NaN are no exponent field alone.
                        special = T.if_then_else(exponent == 0, T.uint32(0x00400000), T.uint32(0x7FC00000))
                        is_special = T.bitwise_or(exponent == 0, exponent == 255)
                        scales[i, g] = T.reinterpret(T.if_then_else(is_special, special, exponent << 23), "float32")
                else:
                    T.copy(sf, scales)
                for i, j in T.Parallel(block_pairs, block_channels):
                    values[i, j] = T.cast(T.cast(found[i, j], "float32") * scales[i, j // GROUP], "bfloat16")
                T.copy(values, out[first:end, channel:end_channel])
            else:
                T.copy(found, out[first:end, channel:end_channel])

    return engram_lookup


def lookup_kernel_for(table: Tensor, table_sf: Tensor | None, is_pinned: bool, arch: Arch) -> Callable[..., None]:
    """The kernel that reads this table."""
    vector = min(VECTOR, check.row_alignment(table) // table.itemsize)
    sf_dtype = None if table_sf is None else table_sf.dtype
    return _engram_lookup_kernel(table.shape[1], table.dtype, sf_dtype, vector, is_pinned, arch)


def _is_pinned(device: torch.device, table: Tensor, table_sf: Tensor | None) -> bool:
    """Whether the table is in pinned host memory; ValueError if neither there nor on the device of the indices.

    Under torch.compile and for fake tensors, host memory counts as pinned: nobody can tell then.
    """
    if table.device == device:
        return False
    expected = f"device {device} or pinned host memory"
    check.require(table.is_cpu and device.type == "cuda", "table", expected, f"{table.device}")
    if not is_compiling() and type(table) in (Tensor, Parameter):
        check.require(table.is_pinned(), "table", expected, f"{table.device}, not pinned")
        # The reference takes any scales.
        is_read = table_sf is None or table_sf.is_pinned() or serving.uses_reference(device)
        check.require(is_read, "table_sf", "pinned host memory, as table", "memory that is not pinned")
    return True


@op(writes=("out",), aligned=("out",))
def engram_lookup(
    indices: Tensor, table: Tensor, *, table_sf: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Look up rows of a table: out[t, c] = table[indices[t, c]], bfloat16, zeros where the index is negative.

    Codes of an e4m3 table are multiplied by the scale of their row and group of 32 channels, in float32, and rounded to
    bfloat16. Source: Engram, arXiv 2601.07372.

    The table is on the device of the indices, or in pinned host memory, which the kernel reads in place: torch does not
    know of this reading, so such a table must stay as it is until the kernel is done.

    Args:
        indices: int32 (T, C), contiguous. An index of R or more counts as negative (`TK_DEBUG=1` raises ValueError).
        table: bfloat16 or float8_e4m3fn (R, D), D a multiple of 32; rows may be strided. Fast where they begin at
            multiples of 16 bytes, or 8 for e4m3.
        table_sf: for e4m3, and only there, (R, D / 32): float32, or uint8 exponents, b for 2^(b - 127), 255 for NaN. On
            the table's device, where kernels need it pinned like the table; rows may be strided, so that a row's codes
            and exponents can lie side by side.
        out: bfloat16 (T, C, D), contiguous, to be written, overlapping no other argument; None for a new tensor.

    Returns:
        bfloat16 (T, C, D): `out`, if it was given.

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, a table in host memory is not pinned, or table_sf comes with
            a bfloat16 table.
    """
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    num_rows, dim = check.tensor("table", table, dtypes, ("R", "D"), layout="rows")
    check.require(num_rows >= 1, "table", "at least one row", num_rows)
    check.require(dim >= GROUP, "D (columns of table)", f"at least {GROUP}", dim)
    check.multiple_of("D (columns of table)", dim, GROUP)
    sf_shape = (num_rows, dim // GROUP)
    if table.dtype is torch.bfloat16:
        check.require(table_sf is None, "table_sf", "None for a bfloat16 table", type(table_sf).__name__)
    else:
        check.tensor("table_sf", table_sf, _SF_DTYPES, sf_shape, layout="rows", device=table.device)
    num_tokens, num_columns = check_indices(indices, num_rows)
    is_pinned = _is_pinned(indices.device, table, table_sf)
    shape = (num_tokens, num_columns, dim)
    out = given_or_new("out", out, indices, shape, torch.bfloat16)
    if launching(out):
        if table_sf is not None and table_sf.stride(1) != 1:  # of a single column
            table_sf = table_sf.as_strided(sf_shape, (table_sf.stride(0), 1))
        arguments: list[Any] = [indices.view(-1), out.view(-1, dim)]
        if is_pinned:
            arguments += [table.data_ptr(), num_rows, table.stride(0)]
            if table_sf is not None:
                arguments += [table_sf.data_ptr(), table_sf.stride(0)]
        else:
            arguments += [table] if table_sf is None else [table, table_sf]
        lookup_kernel_for(table, table_sf, is_pinned, get_arch(indices.device))(*arguments)
    return out
