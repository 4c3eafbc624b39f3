"""per_channel_cast_fused: quantize each channel by blocks of 128 rows, of x, of a pair, or of gathered rows of either.

For each channel of each block of 128 rows (the last block of gathered rows may be shorter), in float32:

    value[p] = x[p], or data[p] * sf[p] of a pair;   with pos_to_token, of row pos_to_token[p], or 0 where there is none
    amax = max(max |value|, 1e-4);   sf = amax / 448;   data = round(value * (448 / amax))
    with round_sf:    sf = least power of two >= that quotient;   data = round(value * (1 / sf))

x (num_tokens, hidden), bfloat16, float32, or float8_e4m3fn beside float32 (num_tokens, hidden / 128);
data float8_e4m3fn (num_rows, hidden), sf float32 (ceil(num_rows / 128), hidden).

Tensors go through the kernel of per_channel_cast. The kernel here is for pairs, where converting an element costs more
than moving its byte, so that latencies must hide behind other work. A tile is 128 rows by 128 channels; a thread block
takes `width` of them, beside each other, in a turn, and has three turns under way. Neighbouring thread blocks take
neighbouring rows, for what all of them read at a time to stay in L2:

    turn t    ask for the indices of turn t + 3       registers
              copy the codes and sf of turn t + 2     to one of three stages in shared memory
              work on the tiles of turn t             as in per_channel_cast, values in registers as float32
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.channel_blocks import TILE_ROWS, channel_block_macros
from tk_quant.per_channel_cast import check_blocks, check_plain_cast, per_channel_cast_out
from tk_quant.quantize import MAGNITUDES, encode_macro, load_codes_macro, store_codes_macro

_GROUP = 128
_STAGES = 3
_ROWS, _VEC = 8, 8
_COL_LANES = _GROUP // _VEC
_THREADS = TILE_ROWS // _ROWS * _COL_LANES
_CHUNKS = _GROUP // 16
_ROW_WORDS = _GROUP // 4
# Of codes, then of sf.
_TILE_WORDS = TILE_ROWS * (_ROW_WORDS + 1)

_COPIES = r"""
// Some 16-byte chunks of a row, `step` bytes apart, of num_tiles tiles from global to shared memory, before a wait that
// counts this thread's groups of copies; zeros for tiles that are not among the first `wanted`.
template <int num_tiles, int tile_bytes, int num_chunks, int step>
__device__ __forceinline__ void tk_copy_row(void *to, const void *from, int wanted) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int tile = 0; tile < num_tiles; ++tile)
#pragma unroll
    for (int k = 0; k < num_chunks; ++k)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place + tile * tile_bytes + k * step),
                   "l"(static_cast<const char *>(from) + tile * 128 + k * step), "r"(tile < wanted ? 16 : 0)
                   : "memory");
}

// The same of sf, one of each tile.
template <int num_tiles, int tile_bytes>
__device__ __forceinline__ void tk_copy_sf(void *to, const float *from, int wanted) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int tile = 0; tile < num_tiles; ++tile)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place + tile * tile_bytes), "l"(from + tile),
                 "r"(tile < wanted ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void tk_end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// x, but as if it came from elsewhere: a compiler that thinks it cheap to compute would do so again in every turn.
__device__ __forceinline__ int tk_keep(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// All groups but the last one are done, for this thread.
__device__ __forceinline__ void tk_wait_for_all_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ void tk_wait_for_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
"""


@dataclass(frozen=True, eq=False)
class PerChannelRecastConfig:
    """Launch knobs of the kernel for pairs."""

    copy_lanes: int
    """Threads that copy a row of a tile: 4 or 8."""
    width: int
    """Tiles beside each other that a block takes in a turn."""
    halves: int
    """Half warps that share the work on a factor: 1, or 2 where there are threads for it."""
    blocks_per_sm: int
    """Blocks on a multiprocessor, each of which takes tile after tile."""

    @staticmethod
    @cache
    def best(arch: Arch) -> "PerChannelRecastConfig":
        """The configuration for an architecture."""
        # Three stages of two tiles take 102 KiB.
        roomy = arch.max_shared_memory >= 227 * 1024
        return PerChannelRecastConfig(copy_lanes=4, width=2 if roomy else 1, halves=2, blocks_per_sm=2 if roomy else 1)


# A thread's guards cover all that it does. With each shared array for one purpose only, the barriers below are enough.
@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
        "tl.disable_thread_storage_sync": True,
    }
)
def _per_channel_recast_kernel(
    alignment: int, hidden: int, gathered: bool, round_sf: bool, config: PerChannelRecastConfig, arch: Arch
) -> Any:
    import tilelang.language as T

    copy_lanes, width = config.copy_lanes, config.width
    stage_words = width * _TILE_WORDS
    rows_at_once = _THREADS // copy_lanes
    copy_rows = ceil_div(TILE_ROWS, rows_at_once)
    col_tiles = hidden // _GROUP
    load = load_codes_macro("float8_e4m3fn", 1, 16, alignment)
    take_amax, make_factors, parts_shape = channel_block_macros(
        False, _ROWS, _VEC, _GROUP, TILE_ROWS, round_sf, config.halves
    )
    encode, store_codes = encode_macro("e4m3", _VEC), store_codes_macro(_VEC // 4)

    num_tokens, num_rows, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_rows"), T.dynamic("num_blocks")
    row_stride = T.dynamic("row_stride")
    x_rows = num_tokens if gathered else num_rows
    map_type = T.Tensor((num_rows,), "int32") if gathered else T.int32

    @T.macro
    def next_tiles(row_tile: T.Ref, col_tile: T.Ref, row_step: T.int32, col_step: T.int32) -> None:
        """One turn on: by as many as there are thread blocks, in columns and what is left of one."""
        row_tile += row_step
        col_tile += col_step
        if row_tile >= num_blocks:
            row_tile -= num_blocks
            col_tile += width

    @T.macro
    def take_indices(source: T.Buffer, pos_to_token: Any, first_row: T.int32, col_tile: T.int32) -> None:
        """The rows of x that this thread copies of a tile; -1 for zeros."""
        for i in T.unroll(copy_rows):
            row = first_row + i * rows_at_once
            source[i] = -1
            if gathered:
                if row < num_rows and col_tile < col_tiles:
                    source[i] = pos_to_token[row]
                if source[i] >= num_tokens:
                    source[i] = -1
            elif col_tile < col_tiles:
                source[i] = row

    @T.macro
    def copy_tiles(
        x: T.Buffer,
        x_sf: T.Buffer,
        stage: T.Buffer,
        place: T.int32,
        sf_place: T.int32,
        source: T.Buffer,
        col: T.int32,
        col_tile: T.int32,
    ) -> None:
        thread = T.get_thread_binding()
        for i in T.unroll(copy_rows):
            num_tiles = width if col_tiles % width == 0 else T.min(col_tiles - col_tile, width)
            wanted = T.if_then_else(source[i] >= 0, num_tiles, 0)
            if thread % copy_lanes == 0:
                T.call_extern(
                    "void",
                    f"tk_copy_sf<{width}, {4 * _TILE_WORDS}>",
                    T.access_ptr(stage[sf_place + i * rows_at_once], "w"),
                    T.access_ptr(x_sf[source[i], col_tile], "r"),
                    wanted,
                )
            to = place + i * (rows_at_once * _ROW_WORDS)
            if alignment == 16:
                T.call_extern(
                    "void",
                    f"tk_copy_row<{width}, {4 * _TILE_WORDS}, {_CHUNKS // copy_lanes}, {16 * copy_lanes}>",
                    T.access_ptr(stage[to], "w"),
                    T.access_ptr(x[source[i], col], "r"),
                    wanted,
                )
            else:
                words = T.alloc_local((1, 4), "uint32")
                for tile in T.unroll(width):
                    for k in T.unroll(_CHUNKS // copy_lanes):
                        for j in T.unroll(4):
                            words[0, j] = T.uint32(0)
                        load(x, words, 0, source[i], col + tile * _GROUP + k * copy_lanes * 16, tile < wanted)
                        T.sts128(stage[to + tile * _TILE_WORDS + k * copy_lanes * 4], words[0, 0:4])
        T.call_extern("void", "tk_end_group_of_copies")

    @T.macro
    def dequantize(stage: T.Buffer, place: T.int32, sf_place: T.int32, values: T.Buffer) -> None:
        row_sf = T.alloc_local((_ROWS,), "uint32")
        words = T.alloc_local((2,), "uint32")
        codes = T.view(words, (_VEC,), "float8_e4m3fn")
        decoded = T.alloc_local((_VEC,), "float32")
        for i in T.unroll(_ROWS // 4):
            row_sf[4 * i : 4 * i + 4] = T.lds128(stage[sf_place + 4 * i])
        for i in T.unroll(_ROWS):
            words[0:2] = T.lds64(stage[place + i * _ROW_WORDS])
            for j in T.vectorized(_VEC):
                decoded[j] = T.cast(codes[j], "float32")
            for j in T.unroll(_VEC):
                values[i, j] = T.reinterpret(decoded[j] * T.reinterpret(row_sf[i], "float32"), "uint32")

    @T.prim_func
    def per_channel_recast(
        x: T.StridedTensor((x_rows, hidden), (row_stride, 1), "float8_e4m3fn"),
        x_sf: T.Tensor((x_rows, col_tiles), "float32"),
        pos_to_token: map_type,
        out: T.Tensor((num_rows, hidden), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
        num_thread_blocks: T.int32,
        num_turns: T.int32,
        num_last: T.int32,
        row_step: T.int32,
        col_step: T.int32,
    ) -> None:
        with T.Kernel(num_thread_blocks, threads=_THREADS) as thread_block:
            T.import_source(MAGNITUDES + _COPIES)
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            thread = T.get_thread_binding()
            row_lane, lane_col = thread // _COL_LANES, thread % _COL_LANES * _VEC
            stage = T.alloc_shared((_STAGES * stage_words,), "uint32")
            parts = T.alloc_shared(parts_shape, "uint32")
            factors = T.alloc_shared((1, _GROUP), "float32")
            source = T.alloc_local((copy_rows,), "int32")
            values = T.alloc_local((_ROWS, _VEC), "uint32")
            factor = T.alloc_local((_VEC,), "float32")
            scaled = T.alloc_local((_VEC,), "float32")
            codes = T.alloc_local((_VEC // 4,), "uint32")
            # Of the tiles that are worked on, and of those whose indices have been asked for.
            row_tile, col_tile = T.alloc_var("int32"), T.alloc_var("int32")
            next_row_tile, next_col_tile = T.alloc_var("int32"), T.alloc_var("int32")
            slot, copy_slot = T.alloc_var("int32"), T.alloc_var("int32")
            read_at, read_sf_at, out_row = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            copy_at, copy_sf_at = T.alloc_var("int32"), T.alloc_var("int32")
            copy_row, copy_col = T.alloc_var("int32"), T.alloc_var("int32")

            read_at = T.call_extern("int32", "tk_keep", row_lane * _ROWS * _ROW_WORDS + lane_col // 4)
            read_sf_at = T.call_extern("int32", "tk_keep", TILE_ROWS * _ROW_WORDS + row_lane * _ROWS)
            copy_at = T.call_extern("int32", "tk_keep", thread // copy_lanes * _ROW_WORDS + thread % copy_lanes * 4)
            copy_sf_at = T.call_extern("int32", "tk_keep", TILE_ROWS * _ROW_WORDS + thread // copy_lanes)
            copy_row = T.call_extern("int32", "tk_keep", thread // copy_lanes)
            copy_col = T.call_extern("int32", "tk_keep", thread % copy_lanes * 16)
            out_row = T.call_extern("int32", "tk_keep", row_lane * _ROWS)
            row_tile = T.truncmod(thread_block, num_blocks)
            col_tile = T.truncdiv(thread_block, num_blocks) * width
            next_row_tile = row_tile
            next_col_tile = col_tile
            take_indices(source, pos_to_token, next_row_tile * TILE_ROWS + copy_row, next_col_tile)
            for i in T.unroll(_STAGES - 1):
                to, sf_to, first_col = i * stage_words + copy_at, i * stage_words + copy_sf_at, next_col_tile * _GROUP
                copy_tiles(x, x_sf, stage, to, sf_to, source, first_col + copy_col, next_col_tile)
                next_tiles(next_row_tile, next_col_tile, row_step, col_step)
                take_indices(source, pos_to_token, next_row_tile * TILE_ROWS + copy_row, next_col_tile)
            slot = 0
            copy_slot = (_STAGES - 1) * stage_words
            T.call_extern("void", "tk_wait_for_all_but_last")
            T.sync_threads()
            for _ in T.serial(num_turns + T.Select(thread_block < num_last, 1, 0)):
                # Nobody reads what is overwritten now: it is of the last turn, and read before its last two barriers.
                to, sf_to, next_col = copy_slot + copy_at, copy_slot + copy_sf_at, next_col_tile * _GROUP
                copy_tiles(x, x_sf, stage, to, sf_to, source, next_col + copy_col, next_col_tile)
                next_tiles(next_row_tile, next_col_tile, row_step, col_step)
                take_indices(source, pos_to_token, next_row_tile * TILE_ROWS + copy_row, next_col_tile)
                for part in T.unroll(width):
                    at = slot + part * _TILE_WORDS
                    first_col = (col_tile + part) * _GROUP
                    dequantize(stage, at + read_at, at + read_sf_at, values)
                    take_amax(values, parts, row_lane, lane_col)
                    T.sync_threads()
                    make_factors(parts, factors, sf, row_tile, first_col, hidden)
                    if part == width - 1:
                        T.call_extern("void", "tk_wait_for_all_but_last")
                    T.sync_threads()
                    for j in T.vectorized(_VEC):
                        factor[j] = factors[0, lane_col + j]
                    row = row_tile * TILE_ROWS + out_row
                    # A multiple of 16 rows: a thread has them all or none.
                    if row < num_rows and (col_tiles % width == 0 or col_tile + part < col_tiles):
                        for i in T.unroll(_ROWS):
                            for j in T.unroll(_VEC):
                                scaled[j] = T.reinterpret(values[i, j], "float32") * factor[j]
                            encode(scaled, codes)
                            store_codes(out, codes, row + i, first_col + lane_col)
                next_tiles(row_tile, col_tile, row_step, col_step)
                slot = T.if_then_else(slot == (_STAGES - 1) * stage_words, 0, slot + stage_words)
                copy_slot = T.if_then_else(copy_slot == (_STAGES - 1) * stage_words, 0, copy_slot + stage_words)
            T.call_extern("void", "tk_wait_for_all")

    return per_channel_recast


def _reference(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    pos_to_token: torch.Tensor | None,
    out: torch.Tensor,
    sf: torch.Tensor,
    round_sf: bool,
) -> None:
    from tk_quant.reference.per_channel_cast_fused import per_channel_cast_fused as whole

    new_out, new_sf = whole((x, x_sf), "e4m3", TILE_ROWS, round_sf, _GROUP, pos_to_token)
    out.copy_(new_out)
    sf.copy_(new_sf)


@op("tk_quant::per_channel_recast_out", mutates=("out", "sf"), reference=_reference)
def _per_channel_recast_out(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    pos_to_token: torch.Tensor | None,
    out: torch.Tensor,
    sf: torch.Tensor,
    round_sf: bool,
) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    num_blocks, hidden = sf.shape
    config = PerChannelRecastConfig.best(arch)
    num_turns = num_blocks * ceil_div(hidden, config.width * _GROUP)
    num_thread_blocks = min(num_turns, config.blocks_per_sm * get_num_sms(x.device))
    col_step, row_step = divmod(num_thread_blocks, num_blocks)
    _per_channel_recast_kernel(check.row_alignment(x), hidden, pos_to_token is not None, round_sf, config, arch)(
        *(x, x_sf, 0 if pos_to_token is None else pos_to_token, out, sf, num_thread_blocks),
        *(num_turns // num_thread_blocks, num_turns % num_thread_blocks, row_step, col_step * config.width),
    )


@replayable
def per_channel_cast_fused(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by blocks of one channel: of a tensor, of what a pair stands for, or of gathered rows of either.

    value[p] = x[p], or for a pair data[p] * sf[p] rounded to float32; with `pos_to_token`, of row pos_to_token[p], and
    0 where that is negative. For each channel of each 128 rows: amax = max(max |value|, 1e-4), sf = amax / 448,
    data = round(value * (448 / amax)); with `round_sf`: sf = the least power of two at least amax / 448,
    data = round(value * (1 / sf)). Name, arguments and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden), hidden a multiple of 64; or a pair `(data, sf)`, float8_e4m3fn
            (num_tokens, hidden) and contiguous float32 (num_tokens, hidden / 128), hidden a multiple of 128. Rows of x
            or of data may be strided.
        fmt: "e4m3".
        num_per_tokens: 128, rows of a block.
        round_sf: whether scale factors are powers of two.
        num_per_channels: 128 for a pair, channels of a block of it; None otherwise.
        pos_to_token: int32 (num_rows,), the row of x that a row of the result comes from; negative for none, and an
            index past the last row counts as that (`TK_DEBUG=1` raises ValueError). num_rows is a multiple of 16.
            Without it num_rows is num_tokens, a multiple of 128.

    Returns:
        data float8_e4m3fn (num_rows, hidden) and sf float32 (ceil(num_rows / 128), hidden), both contiguous. A block
        with an infinity or a NaN has that for sf.

    Raises:
        TypeError: x is none of these, or an argument has another type or dtype.
        ValueError: a shape, stride or device is not as described; fmt, num_per_tokens or num_per_channels is none of
            those above.
    """
    x_sf = None
    if isinstance(x, tuple | list):
        check.require(len(x) == 2, "x", "a pair (data, sf)", x)
        x, x_sf = x
        num_tokens, hidden = check.tensor("x[0]", x, (torch.float8_e4m3fn,), ("num_tokens", "hidden"), layout="rows")
        check.require(hidden > 0 and hidden % _GROUP == 0, "x[0].shape[1]", f"a positive multiple of {_GROUP}", hidden)
        check.tensor("x[1]", x_sf, (torch.float32,), (num_tokens, hidden // _GROUP), device=x.device)
        check.one_of("num_per_channels", num_per_channels, (_GROUP,))
        check_blocks(fmt, num_per_tokens, round_sf)
    else:
        num_tokens, hidden = check_plain_cast(x, fmt, num_per_tokens, round_sf)
        check.require(num_per_channels is None, "num_per_channels", "None, for x is no pair", num_per_channels)
    num_rows = num_tokens
    if pos_to_token is None:
        check.multiple_of("rows of x", num_rows, TILE_ROWS)
    else:
        (num_rows,) = check.tensor("pos_to_token", pos_to_token, (torch.int32,), ("num_rows",), device=x.device)
        check.multiple_of("pos_to_token.shape[0]", num_rows, 16)
        if not torch.compiler.is_compiling() and env.debug() and num_rows and not pos_to_token.is_meta:
            highest = int(pos_to_token.max())
            check.require(highest < num_tokens, "pos_to_token", f"indices below {num_tokens}", highest)
    out = x.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((ceil_div(num_rows, TILE_ROWS), hidden), dtype=torch.float32)
    if x_sf is None:
        per_channel_cast_out(x, pos_to_token, out, sf, round_sf)
    else:
        _per_channel_recast_out(x, x_sf, pos_to_token, out, sf, round_sf)
    return out, sf
