"""The kernel of per_block_cast for blocks of one element, bfloat16 to e4m3 with packed sf: a byte of sf for each code.

Thread by thread, two elements at a time in bfloat16, about 10 instructions an element; at the tile level, which was not
timed, there would be about 24. A thread has eight channels of four tokens, and stores their words of sf,
which are neighbours, at once.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.fp8 import cast_elements_bf16x8
from tk_quant.lib.cast_formats import CastInput
from tk_quant.lib.quantize import load_macro, store_codes_macro

_VEC, _ROWS, _LANES, _WARPS = 8, 4, 8, 8


# Every access has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def cast_elements_kernel(source: CastInput, hidden: int, has_data: bool, arch: Arch) -> Any:
    """Build `cast_elements(x, data, sf)`; data is None where sf alone is wanted."""
    import tilelang.language as T

    from tk_quant.lib.cast_tiles import input_type
    from tk_quant.lib.scales_io import scales_type

    load, store_codes = load_macro(_VEC // 2, 2, source.alignment), store_codes_macro(_VEC // 4)
    tile_rows, col_tiles = _WARPS * (32 // _LANES) * _ROWS, ceil_div(hidden, _LANES * _VEC)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def cast_elements(
        x: input_type(source, num_tokens, hidden),
        data: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        sf: scales_type(num_tokens, hidden, ScaleLayout.PACKED_UE8M0),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, tile_rows) * col_tiles, threads=32 * _WARPS) as tile:
            T.annotate_min_blocks_per_sm(2)
            thread = T.get_thread_binding()
            # Variables: as parts of an address these would be divisions of 64 bits.
            row, col = T.alloc_var("int32"), T.alloc_var("int32")
            row = tile // col_tiles * tile_rows + thread // _LANES * _ROWS
            col = (tile % col_tiles * _LANES + thread % _LANES) * _VEC
            num_rows = T.if_then_else(col < hidden, num_tokens - row, 0)
            words = T.alloc_local((_ROWS, _VEC // 2), "uint32")
            codes = T.alloc_local((2,), "uint32")
            exponents = T.alloc_local((2, 4), "uint32")
            for i in T.unroll(_ROWS):
                load(x, words, i, row + i, col, i < num_rows)
            for i in T.unroll(_ROWS):
                outputs = T.address_of(codes[0]), T.address_of(exponents[0, i])
                cast_elements_bf16x8(T.address_of(words[i, 0]), *outputs, 4)
                if has_data and i < num_rows:
                    store_codes(data, codes, row + i, col)
            for k in T.unroll(2):
                if num_rows >= _ROWS:
                    T.stg128(sf[row, col // 4 + k], exponents[k, 0:4])
                else:
                    for i in T.unroll(_ROWS - 1):
                        if i < num_rows:
                            sf[row + i, col // 4 + k] = T.reinterpret(exponents[k, i], "int32")

    return cast_elements
