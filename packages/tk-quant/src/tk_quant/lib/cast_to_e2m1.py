"""The kernel of per_token_cast from bfloat16 to e2m1 by groups of 16 to 128 channels, with packed exponents for sf.

Thread by thread: at the tile level it takes 8 % longer (H200). A thread takes a piece of 16 neighbouring channels, of
two rows at once so that enough loads are in flight. A group is owned by neighbouring threads of a warp, which agree on
amax by shuffles:

              tile of lanes x 16 channels                   e.g. groups of 32:
            ┌───────────┬───────────┬─   ─┬────────┐
    rows ×  │ group     │ group     │  …  │        │         thread  0, 1   2, 3   4, 5   6, 7   8, 9  …
    pieces  │ l0, l1    │ l2, l3    │     │        │         group    0      1      2      3      4    …
            └───────────┴───────────┴─   ─┴────────┘         one word of four sf, put together by shuffles too
"""

from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout
from tk_quant.device.magnitude import larger_magnitude_bf16x2
from tk_quant.device.scaled_fp4 import e2m1x8_by_power
from tk_quant.lib.cast_formats import CastInput, CastScales
from tk_quant.lib.quantize import load_macro, store_codes_macro

_VEC = 16
_PIECES = 2
_THREADS = 128


def casts_to_e2m1(source: CastInput, fmt: str, block_size: tuple[int, int], scales: CastScales, arch: Arch) -> bool:
    """Whether this kernel serves such a cast."""
    fits = fmt == "e2m1" and block_size[0] == 1 and _VEC <= block_size[1] <= 128
    from_bf16 = source.dtype is torch.bfloat16 and not arch.has_fp4_convert
    return fits and from_bf16 and scales.layout is ScaleLayout.PACKED_UE8M0


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them, and there is no shared
# memory.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True})
def cast_to_e2m1_kernel(hidden: int, group: int, alignment: int, arch: Arch) -> Any:
    """Build `per_token_cast(x, data, sf)`."""
    import tilelang.language as T

    from tk_quant.lib.scales_io import bits_of_bf16_amax, scale_of_amax, scales_type

    group_lanes, num_groups = group // _VEC, ceil_div(hidden, group)
    word_lanes = group_lanes * (4 if hidden > group else 1)
    # Down a column the words of sf are neighbours, so a block's rows fill whole sectors of them.
    lanes = max(word_lanes, 8)
    rows = _THREADS // lanes
    col_tiles = ceil_div(align(ceil_div(hidden, _VEC), word_lanes), lanes)
    load = load_macro(_VEC // 2, 2, alignment, streaming=True)
    store_codes = store_codes_macro(_VEC // 8)
    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride")

    @T.prim_func
    def per_token_cast(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), "bfloat16"),
        data: T.Tensor((num_tokens, hidden // 2), "int8"),
        sf: scales_type(num_tokens, num_groups, ScaleLayout.PACKED_UE8M0),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, rows * _PIECES) * col_tiles, threads=_THREADS) as block:
            thread = T.get_thread_binding()
            lane = thread % lanes
            # Variables: as parts of an address these would be divisions of 64 bits.
            first_row = T.alloc_var("int32")
            first_row = (block // col_tiles * rows + thread // lanes) * _PIECES
            col = T.alloc_var("int32")
            col = (block % col_tiles * lanes + lane) * _VEC
            words = T.alloc_local((_PIECES, _VEC // 2), "uint32")
            codes = T.alloc_local((_VEC // 8,), "uint32")
            part, word, power = T.alloc_var("uint32"), T.alloc_var("uint32"), T.alloc_var("uint32")
            amax = T.alloc_var("int32")
            for i in T.unroll(_PIECES):
                load(x, words, i, first_row + i, col, col < hidden and first_row + i < num_tokens)
            for i in T.unroll(_PIECES):
                row = first_row + i
                valid = col < hidden and row < num_tokens
                part = T.uint32(0)
                for j in T.unroll(_VEC // 2):
                    part = larger_magnitude_bf16x2(part, words[i, j])
                amax = bits_of_bf16_amax(part)
                for j in T.unroll(group_lanes.bit_length() - 1):
                    amax = T.max(amax, T.shfl_xor(amax, 1 << j))
                scale, factor = scale_of_amax(amax, "e2m1", True)
                word = T.if_then_else(valid, T.reinterpret(scale, "uint32") >> T.uint32(23), T.uint32(0))
                if word_lanes > group_lanes:
                    word = word << T.cast(lane // group_lanes % 4 * 8, "uint32")
                    word = word | T.shfl_xor(word, group_lanes)
                    word = word | T.shfl_xor(word, 2 * group_lanes)
                if valid and lane % word_lanes == 0:
                    T.stg32(sf[row, col // group // 4], word)
                power = T.reinterpret(factor, "uint32")
                for j in T.unroll(_VEC // 8):
                    four = tuple(words[i, 4 * j + k] for k in range(4))
                    codes[j] = e2m1x8_by_power(four, power | (power >> T.uint32(16)))
                if valid:
                    store_codes(data, codes, row, col // 2)

    return per_token_cast
