"""The kernel of per_channel_cast_fused for gathered rows of bfloat16 or float32.

It goes like that of per_channel_cast, but thread blocks take one tile of channels after the other, and on their way
fetch into L2 what the next one needs of x. A thread has 16 neighbouring rows of 8 channels, in registers as words.

Thread level: on an H200, 4096 to 34816 rows of 7168 channels take 90 µs of bfloat16 so and 130 of float32, at the tile
level at best 112 and 137.
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.device.memory import prefetch_line
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_quant.lib.column_factors import ColumnFactors
from tk_quant.lib.quantize import (
    OWN_GUARDS_AND_BARRIERS,
    TILE_ROWS,
    element,
    encode_macro,
    load_macro,
    store_codes_macro,
)

_LINE_BYTES = 128
_ROWS = 16
_VEC = 8


# A thread's guards cover all that it does. With each shared array for one purpose only, the barriers below are enough.
@kernel(pass_configs=OWN_GUARDS_AND_BARRIERS)
def gathered_cast_kernel(dtype: torch.dtype, alignment: int, hidden: int, round_sf: bool, arch: Arch) -> Any:
    """Kernel (x, pos_to_token, out, sf)."""
    import tilelang.language as T

    is_bf16, itemsize = dtype is torch.bfloat16, dtype.itemsize
    channels = 512 // itemsize
    col_lanes, row_lanes = channels // _VEC, TILE_ROWS // _ROWS
    threads = col_lanes * row_lanes
    per_word = 4 // itemsize
    num_words = _VEC // per_word
    is_ragged = hidden % channels != 0
    row_lines = channels * itemsize // _LINE_BYTES
    share_amax, make_factors = ColumnFactors(dtype, channels, 1, row_lanes, threads, hidden, round_sf).macros()
    load = load_macro(num_words, per_word, alignment)
    encode, store_codes = encode_macro("e4m3", _VEC), store_codes_macro(_VEC // 4)
    num_tokens, num_rows, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_rows"), T.dynamic("num_blocks")
    row_stride = T.dynamic("row_stride")

    @T.macro
    def prefetch(x: T.Buffer, row_tile: T.int32, col: T.int32) -> None:
        """A share of x[:, col : col + channels], into L2, unless it has more cache lines than there are threads."""
        thread = T.get_thread_binding()
        share = T.ceildiv(x.shape[0], num_blocks)
        row, line_col = thread // row_lines, col + thread % row_lines * (_LINE_BYTES // itemsize)
        token = row_tile * share + row
        if share <= threads // row_lines and row < share and token < x.shape[0] and line_col < x.shape[1]:
            prefetch_line(T.address_of(x[token, line_col]))

    @T.prim_func
    def per_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        pos_to_token: T.Tensor((num_rows,), "int32"),
        out: T.Tensor((num_rows, hidden), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
    ) -> None:
        with T.Kernel(num_blocks, ceil_div(hidden, channels), threads=threads) as (row_tile, col_tile):
            # On sm_100a, nvcc spills up to 16 bytes of a thread to make room for three.
            T.annotate_min_blocks_per_sm(3 if arch.sm == 90 else 2)
            first_col = col_tile * channels
            thread = T.get_thread_binding()
            row_lane, lane_col = thread // col_lanes, thread % col_lanes * _VEC
            row, col = row_tile * TILE_ROWS + row_lane * _ROWS, first_col + lane_col
            inside = col < hidden if is_ragged else True
            words = T.alloc_local((_ROWS, num_words), "uint32")
            parts = T.alloc_shared((row_lanes, channels // per_word), "uint32")
            factors = T.alloc_shared((1, channels), "float32")
            source = T.alloc_local((_ROWS,), "int32")
            for i in T.unroll(_ROWS):
                source[i] = -1
            # A multiple of 16 rows: a thread has them all or none.
            if row < num_rows:
                for i in T.unroll(_ROWS):
                    source[i] = pos_to_token[row + i]
            for i in T.unroll(_ROWS):
                load(x, words, i, source[i], col, inside and source[i] >= 0 and source[i] < num_tokens)
            prefetch(x, row_tile, first_col + channels)

            share_amax(words, parts, row_lane, lane_col // per_word)
            T.sync_threads()
            make_factors(parts, factors, sf, row_tile, first_col)
            T.sync_threads()

            factor = T.alloc_local((_VEC,), "float32")
            scaled = T.alloc_local((_VEC,), "float32")
            codes = T.alloc_local((_VEC // 4,), "uint32")
            for j in T.vectorized(_VEC):
                factor[j] = factors[0, lane_col + j]
            if inside and row < num_rows:
                for i in T.unroll(_ROWS):
                    for j in T.unroll(_VEC):
                        scaled[j] = element(words, i, j, is_bf16) * factor[j]
                    encode(scaled, codes)
                    store_codes(out, codes, row + i, col)

    return per_channel_cast
