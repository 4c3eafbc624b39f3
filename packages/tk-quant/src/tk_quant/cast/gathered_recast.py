"""The kernel of per_channel_cast_fused for gathered rows of a pair, tuned for few instructions and hidden latency.

A thread has 16 channels of 16 neighbouring rows, a thread block of 128 threads a tile of 128 rows and 256 channels:

                        256 channels
             +-----+-----+-- ... --+-----+
     16 rows |  0  |  1  |         |  15 |
             +-----+-----+-- ... --+-----+     0, 1, ...: threads
     16 rows |  16 |  17 |         |  31 |
             +-----+-----+-- ... --+-----+
               ...

Each thread copies its codes to shared memory asynchronously and decodes them from there twice: once for amax and once
to scale them (the codes of four rows stay in registers in between). Keeping codes takes a quarter of the shared memory
of float32 values, and latency is hidden by many tiles in flight. Six thread blocks fit on an SM, as amax takes only one
word of shared memory per channel, which all threads of that channel update by atomicMax. The sf of a row are copied
together with their neighbours, 16 bytes at a time, because such copies bypass L1, which is small beside so much shared
memory; loads of 4 bytes would take 5 % longer.

Neighbouring thread blocks take neighbouring rows of the same channels, so that all of them read a few columns of x,
which stay in L2; the output is stored with an L2 evict-first hint.

A code takes 7 instructions. The first pass takes half of one to unpack it with its neighbour, one to convert to
float32, one to multiply by sf, and half of one for amax, as one instruction finds the maximum of three integers. The
second pass unpacks, converts and multiplies by sf again, takes one to multiply by the factor and half of one to pack.
Tensor cores can convert codes to float32 exactly (times 1, plus zeros), but no faster.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.device.memory import prefetch_bytes, store_evict_first
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_quant.cast.config import OWN_GUARDS_AND_BARRIERS, TILE_ROWS
from tk_quant.device.gather_async import gather_async, wait_for_groups
from tk_quant.device.recast import atomic_max, raise_amax, recast

ALIGNMENT = 16
"""Alignment of the rows of x that the kernel needs, in bytes."""
_GROUP = 128
_CHANNELS = 256
_ROWS = 16
_VEC = 16
_THREADS = TILE_ROWS // _ROWS * (_CHANNELS // _VEC)
_BLOCKS_PER_SM = 6
# Bytes of x read before writing begins, those of the first thread blocks included. H200, 4096 tokens to 34816 rows, one
# column of tiles at a time: 2048 channels take 25.2 us with 7 MB and 25.1 with 11 MB, 7168 channels 81.7 and 81.3;
# 4001 tokens to 16000 rows of 7168 channels 42.9 us with 11 MB and 43.3 with 15 MB.
_EARLY_BYTES = 11 << 20


def is_fastest(num_rows: int, hidden: int, alignment: int, num_sms: int, arch: Arch) -> bool:
    """Whether this kernel supports such a call and is the fastest for it."""
    # An SM has to hold _BLOCKS_PER_SM thread blocks of 37 KB of shared memory.
    if arch.max_shared_memory < 200 * 1024 or alignment != ALIGNMENT or hidden % _CHANNELS != 0:
        return False
    # H100, this kernel and the other, by tiles per SM: with 1.1 (544 rows, 7168 channels) 4.9 and 4.35 us, with 1.7
    # (1024 rows) 5.67 and 5.41, with 1.9 (2048 rows, 4096 channels) 5.82 and 5.95, with 3.4 (2048 rows) 8.6 and 9.9.
    return 4 * ceil_div(num_rows, TILE_ROWS) * (hidden // _CHANNELS) > 7 * num_sms


def _cols_at_once(hidden: int) -> int:
    """Columns of tiles that are in flight at a time."""
    # H200, 4096 tokens to 34816 rows, two columns and one: with 7168 channels 81.0 and 81.7 us, with 6144 69.6 and
    # 70.0; but with 4096 47.6 and 47.3, with 2048 26.0 and 25.5.
    return 2 if hidden >= 6144 and hidden % (2 * _CHANNELS) == 0 else 1


def prefetched_columns(num_rows: int, num_tokens: int, hidden: int, num_sms: int) -> tuple[int, int]:
    """`(first_col, num_cols)` of x that the first thread block on each SM prefetches into L2, for later blocks.

    It does so after issuing its own loads: reads are cheapest while nothing is written yet. Each thread of these
    blocks prefetches one row of x; if x has more rows than that, nothing is prefetched.
    """
    if num_tokens > _THREADS * num_sms:
        return 0, 0
    row_tiles, first_blocks = ceil_div(num_rows, TILE_ROWS), _BLOCKS_PER_SM * num_sms
    at_once = _cols_at_once(hidden)
    first_col = min(ceil_div(first_blocks, row_tiles * at_once) * at_once * _CHANNELS, hidden)
    early_cols = _EARLY_BYTES // _CHANNELS // max(num_tokens, 1) * _CHANNELS
    return first_col, max(min(early_cols, hidden) - first_col, 0)


# Thread level, with four groups of copies in flight a thread: H100, 4096 tokens to 34816 rows of 7168, 105 us where the
# tile-level per_channel_cast_kernel takes 154; docs/tuning/tile-level.md.
# No shared array is reused, so the barriers below suffice.
@kernel(pass_configs=OWN_GUARDS_AND_BARRIERS)
def gathered_recast_kernel(hidden: int, sf_alignment: int, round_sf: bool, arch: Arch) -> Any:
    """Build `gathered_recast(x, x_sf, pos_to_token, out, sf, least_amax, num_sms, *prefetched_columns(...))`."""
    import tilelang.language as T

    from tk_quant.cast.scales import quick_sf_of_amax

    col_lanes = _CHANNELS // _VEC
    groups, row_groups = _CHANNELS // _GROUP, hidden // _GROUP
    at_once = _cols_at_once(hidden)
    sf_per_copy = sf_alignment // 4

    num_tokens, num_rows, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_rows"), T.dynamic("num_blocks")
    row_stride = T.dynamic("row_stride", "int64")

    # Position of a channel in shared arrays. Avoids bank conflicts of threads that access 16, 8 or one channel each.
    def slot(channel: Any) -> Any:
        return channel ^ (channel // 32 % 4 * 4)

    def slot_of_largest(channel: Any) -> Any:
        return channel % 8 * 32 + (channel // 8 ^ channel % 8 * 4)

    @T.prim_func
    def gathered_recast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), "float8_e4m3fn"),
        x_sf: T.Tensor((num_tokens, hidden // _GROUP), "float32"),
        pos_to_token: T.Tensor((num_rows,), "int32"),
        out: T.Tensor((num_rows, hidden), "float8_e4m3fn"),
        sf: T.Tensor((num_blocks, hidden), "float32"),
        least_amax: T.float32,
        num_sms: T.int32,
        prefetched_col: T.int32,
        num_prefetched: T.int32,
    ) -> None:
        grid = (num_blocks * at_once, hidden // _CHANNELS // at_once)
        with T.Kernel(*grid, threads=_THREADS) as (first, second):
            T.annotate_min_blocks_per_sm(_BLOCKS_PER_SM)
            row_tile, col_tile = first // at_once, second * at_once + first % at_once
            block = second * num_blocks * at_once + first
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            row_lane, lane_col = thread // col_lanes, thread % col_lanes * _VEC
            first_row, first_col = row_tile * TILE_ROWS, col_tile * _CHANNELS
            row, col = first_row + row_lane * _ROWS, first_col + lane_col
            # Position of the sf of the thread's rows and group.
            sf_slot = warp * 128 + lane_col // _GROUP * 32 + row_lane % 2 * _ROWS
            # The codes of each thread; the sf of each row, for this tile and a neighbouring one; amax so far and the
            # factor of each channel.
            codes = T.alloc_shared((_ROWS, _THREADS, 4), "uint32")
            row_sf = T.alloc_shared((TILE_ROWS * 4,), "uint32")
            largest = T.alloc_shared((_CHANNELS,), "uint32")
            factors = T.alloc_shared((_CHANNELS,), "uint32")
            source = T.alloc_var("uint32")
            one_sf = T.alloc_local((groups,), "uint32")
            four_sf_bits = T.alloc_local((4,), "uint32")
            four_sf = T.view(four_sf_bits, (4,), "float32")
            words = T.alloc_local((4, 4), "uint32")
            amax = T.alloc_local((_VEC,), "uint32")
            kept, other = T.alloc_var("uint32"), T.alloc_var("uint32")
            factor_bits = T.alloc_local((_VEC,), "uint32")
            factor = T.view(factor_bits, (_VEC,), "float32")
            new_codes = T.alloc_local((4,), "uint32")

            # Each thread looks up one row and copies its sf; a negative source becomes a large uint32.
            source = T.uint32(0xFFFFFFFF)
            if first_row + thread < num_rows:
                source = T.cast(pos_to_token[first_row + thread], "uint32")
            for i in T.unroll(4 // sf_per_copy):
                sf_col = col_tile * groups // 4 * 4 + i * sf_per_copy
                gather_async(
                    T.address_of(row_sf[thread * 4 + i * sf_per_copy]),
                    T.address_of(x_sf[0, sf_col]),
                    source,
                    T.uint32(4 * row_groups),
                    T.if_then_else(sf_col < row_groups, T.cast(num_tokens, "uint32"), T.uint32(0)),
                    sf_alignment,
                )
            for quarter in T.unroll(_ROWS // 4):
                for k in T.unroll(4):
                    gather_async(
                        T.address_of(codes[4 * quarter + k, thread, 0]),
                        T.address_of(x[0, col]),
                        T.shfl_sync(source, 4 * quarter + k, width=_ROWS),
                        T.cast(row_stride, "uint32"),
                        T.cast(num_tokens, "uint32"),
                        16,
                    )
                T.ptx_commit_group()
            token = block + thread * num_sms
            if block < num_sms and token < num_tokens and num_prefetched > 0:
                prefetch_bytes(T.address_of(x[token, prefetched_col]), num_prefetched)
            for k in T.unroll(_CHANNELS // _THREADS):
                largest[k * _THREADS + thread] = T.reinterpret(least_amax, "uint32")
            T.sync_threads()

            for j in T.unroll(_VEC):
                amax[j] = T.uint32(0)
            for quarter in T.unroll(_ROWS // 4):
                wait_for_groups(_ROWS // 4 - 1 - quarter)
                if quarter == 0:
                    # From row-major to group-major. A warp needs only the sf that its own threads have copied.
                    for i in T.unroll(groups):
                        one_sf[i] = row_sf[thread * 4 + col_tile * groups % 4 + i]
                    T.sync_warp()
                    for i in T.unroll(groups):
                        row_sf[warp * 128 + i * 32 + lane] = one_sf[i]
                    T.sync_warp()
                four_sf_bits[0:4] = T.lds128(row_sf[sf_slot + 4 * quarter])
                for k in T.unroll(0, 4, 2):
                    words[k, 0:4] = T.lds128(codes[4 * quarter + k, thread, 0])
                    words[k + 1, 0:4] = T.lds128(codes[4 * quarter + k + 1, thread, 0])
                    for j in T.unroll(4):
                        raise_amax(T.address_of(amax[4 * j]), words[k, j], four_sf[k], words[k + 1, j], four_sf[k + 1])
            # Lanes 16 apart have the same channels: the lower goes on with the first eight, the upper with the last.
            is_upper = row_lane % 2 == 1
            for j in T.unroll(_VEC // 2):
                channel = lane_col + row_lane % 2 * 8 + j
                kept = T.if_then_else(is_upper, amax[j + 8], amax[j])
                other = T.shfl_xor(T.if_then_else(is_upper, amax[j], amax[j + 8]), 16)
                atomic_max(T.address_of(largest[slot_of_largest(channel)]), T.max(kept, other))
            T.sync_threads()
            for k in T.unroll(_CHANNELS // _THREADS):
                channel = k * _THREADS + thread
                bits = T.reinterpret(largest[slot_of_largest(channel)], "int32")
                sf[row_tile, first_col + channel], of_channel = quick_sf_of_amax(bits, "e4m3", round_sf)
                factors[slot(channel)] = T.reinterpret(of_channel, "uint32")
            T.sync_threads()

            for j in T.unroll(4):
                factor_bits[4 * j : 4 * j + 4] = T.lds128(factors[slot(lane_col + 4 * j)])
            if row < num_rows:
                for step in T.unroll(_ROWS // 4):
                    # The last four rows come first: their codes are still in registers.
                    quarter = _ROWS // 4 - 1 - step
                    four_sf_bits[0:4] = T.lds128(row_sf[sf_slot + 4 * quarter])
                    for k in T.unroll(4):
                        if step > 0:
                            words[k, 0:4] = T.lds128(codes[4 * quarter + k, thread, 0])
                        for j in T.unroll(4):
                            new_codes[j] = recast(words[k, j], four_sf[k], T.address_of(factor[4 * j]))
                        store_evict_first(T.address_of(out[row + 4 * quarter + k, col]), T.address_of(new_codes[0]))

    return gathered_recast
