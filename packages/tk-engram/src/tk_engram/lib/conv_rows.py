"""The convolution in one pass: thread blocks hold whole rows, so that they find a row's rstd themselves.

A thread block walks over the tokens of one stream (see `lib/conv.py`), a batch of rows at a time. Rows are copied to
shared memory some batches ahead, and stay there until no later row needs them:

    shared memory   [ 3 rows before | batch at work | batches in flight ]       a ring of rows
    registers       the filter of each thread's channels, and the batch's rstds

Formulas and arguments are those of `short_conv`, whose two kernels serve calls with a state, and rows that are wider or
take more threads.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_engram.lib.conv import RowThreads

MAX_WHOLE_ROW = 8192
"""Most channels of a row: the filter then takes 64 registers of each of 512 threads."""
MAX_THREADS, MAX_THREADS_WITH_RESIDUAL = 736, 640
"""Most threads: more have 80 registers or fewer each, and nvcc spills."""


@dataclass(frozen=True)
class ConvRowsConfig:
    """Launch knobs. No bit of a result depends on them, but for `row`, which depends on hidden alone."""

    row: RowThreads
    batch: int
    """Rows of a step, which share its barriers."""
    ahead: int
    """Batches in flight while one is worked on."""
    min_blocks: int
    """Thread blocks that must fit on an SM, which bounds the registers of a thread."""

    @property
    def slots(self) -> int:
        """Rows in shared memory."""
        return 3 + self.batch * (1 + self.ahead)

    @property
    def residual_slots(self) -> int:
        """Rows of the residual in shared memory."""
        return self.batch * (1 + self.ahead)

    def shared_bytes(self, has_residual: bool) -> int:
        """Shared memory of a thread block, with a little for sums."""
        return 2 * self.row.channels * (self.slots + has_residual * self.residual_slots) + 1024

    @staticmethod
    def best(hidden: int, has_residual: bool, arch: Arch) -> "ConvRowsConfig":
        """Batches of up to four rows, one or two batches in flight, and about 16 warps on an SM.

        m 4, H 7168, 8192 tokens on an H200, batches of 4, 3, 2 and 1 rows: 309 µs, 432, 339 and 433; two kernels 382.
        With three rows at a time nvcc spills for sm_100 and for more than 448 threads.
        """
        row = RowThreads.best(hidden)
        max_batch = 2 if row.threads > 448 or arch.sm >= 100 else 4
        min_blocks = max(1, 512 // row.threads)
        room = arch.shared_memory_each(min_blocks)
        for batch, ahead in product(range(max_batch, 0, -1), (2, 1)):
            config = ConvRowsConfig(row, batch, ahead, min_blocks)
            if config.shared_bytes(has_residual) <= room:
                return config
        return ConvRowsConfig(row, 1, 0, 1)


def takes_whole_rows(hidden: int, has_residual: bool) -> bool:
    """Whether this kernel serves rows of this size: its threads have registers enough."""
    max_threads = MAX_THREADS_WITH_RESIDUAL if has_residual else MAX_THREADS
    return hidden <= MAX_WHOLE_ROW and RowThreads.best(hidden).threads <= max_threads


def rows_walk_length(num_tokens: int, dilation: int, mhc_mult: int, num_slots: int) -> int:
    """Tokens of a walk, so that the last thread block ends as early as possible; `num_slots` blocks run at a time."""
    num_classes = min(dilation, num_tokens)
    tokens = ceil_div(num_tokens, dilation)
    lengths = {}
    for waves in range(1, 9):
        pieces = min(tokens, max(1, waves * num_slots // (mhc_mult * num_classes)))
        length = ceil_div(tokens, pieces)
        num_blocks = mhc_mult * num_classes * ceil_div(tokens, length)
        # A walk reads three rows more; its wait for the first rows and the filter takes about as long as five rows.
        lengths[length] = ceil_div(num_blocks, num_slots) * (length + 8)
    return min(lengths, key=lengths.__getitem__)


@kernel(pass_configs=DIRECT_COPIES)
def short_conv_rows_kernel(
    mhc_mult: int,
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    is_packed: bool,
    has_residual: bool,
    config: ConvRowsConfig,
    arch: Arch,
) -> Any:
    """`dtypes`: of norm_weight and conv_weight."""
    import tilelang.language as T

    from tk_engram.lib import conv_tile
    from tk_engram.lib.gate_tiles import channels_of_threads, sum_over_threads

    threads, rounds, channels = config.row.threads, config.row.rounds, config.row.channels
    tile, batch, ahead, slots = VECTOR * threads, config.batch, config.ahead, config.slots
    residual_slots = config.residual_slots if has_residual else 1
    # Groups of a step: each copy is one.
    groups = batch * (1 + has_residual)
    # A bit for each tap that a row's sequence has: one register instead of one for the start of each row's sequence.
    has_bits = is_packed and batch > 2
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def short_conv_rows(
        u: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        norm_weight: T.Tensor((mhc_mult, hidden), dtypes[0]),
        conv_weight: T.Tensor((mhc_mult, hidden, 4), dtypes[1]),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        sequences: T.Tensor((2, num_tokens), "int32"),
        out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        dilation: T.int32,
        walk_tokens: T.int32,
        eps: T.float32,
    ) -> None:
        num_walks = T.min(dilation, num_tokens) * T.ceildiv(num_tokens, dilation * walk_tokens)
        with T.Kernel(num_walks * mhc_mult, threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.min_blocks)
            rows = T.alloc_shared((slots, channels), "bfloat16")
            residual_rows = T.alloc_shared((residual_slots, channels), "bfloat16")
            weights = T.alloc_fragment((tile,), dtypes[0])
            taps = T.alloc_fragment((tile, 4), dtypes[1])
            f = [[T.alloc_fragment((tile,), "float32") for _ in range(4)] for _ in range(rounds)]
            row = T.alloc_fragment((1, tile), "bfloat16")
            added = T.alloc_fragment((tile,), "bfloat16")
            before = [T.alloc_fragment((tile,), "float32") for _ in range(3)]
            x, y = (T.alloc_fragment((tile,), "float32") for _ in range(2))
            result = T.alloc_fragment((tile,), "bfloat16")
            parts = [T.alloc_fragment((threads,), "float32") for _ in range(batch)]
            sums = T.alloc_local((batch,), "float32")
            # Those of the three rows before the batch, then those of its rows.
            rstds = T.alloc_local((3 + batch,), "float32")
            starts = T.alloc_local((batch,), "int32")
            are_there = T.alloc_var("int32")
            one_row = channels_of_threads((tile,))
            T.annotate_layout(
                dict.fromkeys((weights, added, *before, x, y, result, *(each for of in f for each in of)), one_row)
                | {row: channels_of_threads(row.shape), taps: conv_tile.taps_layout(tile)}
            )
            stream, walk_index = block % mhc_mult, block // mhc_mult
            num_classes = T.min(dilation, num_tokens)
            first, count = (T.alloc_var("int32") for _ in range(2))
            first = walk_index // num_classes * (dilation * walk_tokens) + walk_index % num_classes
            count = T.min(walk_tokens, T.ceildiv(num_tokens - first, dilation))
            walk = conv_tile.Walk(first, count + 3, dilation)

            for step in T.unroll(ahead):
                conv_tile.fetch_rows(u, rows, walk, stream, 0, step, batch)
                if has_residual:
                    conv_tile.fetch_rows(residual, residual_rows, walk, stream, 0, step, batch)
            for r, filters in enumerate(f):
                conv_tile.load_filter(norm_weight, conv_weight, stream, r * tile, weights, taps, filters)
            for i in T.unroll(3 + batch):
                rstds[i] = T.float32(0)
            for step in T.unroll(T.ceildiv(count + 3, batch), unroll_factor=1):
                if has_bits:
                    for k in T.unroll(batch):
                        token = first + (step * batch + k - 3) * dilation
                        starts[k] = sequences[0, T.max(0, T.min(num_tokens - 1, token))]
                if ahead > 0:
                    T.ptx_wait_group(groups * (ahead - 1))
                conv_tile.fetch_rows(u, rows, walk, stream, 0, step + ahead, batch)
                if has_residual:
                    conv_tile.fetch_rows(residual, residual_rows, walk, stream, 0, step + ahead, batch)
                if ahead == 0:
                    T.ptx_wait_group(0)
                if has_bits:
                    are_there = 0
                    for k in T.unroll(batch):
                        for tap in T.unroll(3):
                            token = first + (step * batch + k - 3 - (tap + 1)) * dilation
                            are_there = are_there | T.cast(token >= starts[k], "int32") << (k * 3 + tap)
                elif is_packed:
                    for k in T.unroll(batch):
                        token = first + (step * batch + k - 3) * dilation
                        starts[k] = sequences[0, T.max(0, T.min(num_tokens - 1, token))]
                for k, of_row in enumerate(parts):
                    T.clear(of_row)
                    for r in T.unroll(rounds):
                        T.copy(rows[(step * batch + k) % slots, r * tile : (r + 1) * tile], row[0, :])
                        conv_tile.add_squares(row, 0, of_row)
                sum_over_threads(tuple(parts), sums)
                for i in T.unroll(3):
                    rstds[i] = rstds[batch + i]
                for k in T.unroll(batch):
                    rstds[3 + k] = T.rsqrt(sums[k] * T.float32(1 / hidden) + eps)
                for r, filters in enumerate(f):
                    for i in (0, 1, 2):
                        T.copy(rows[(step * batch + slots + i - 3) % slots, r * tile : (r + 1) * tile], row[0, :])
                        conv_tile.normalize(row, 0, rstds[i], before[2 - i])
                    for k in T.unroll(batch):
                        index = step * batch + k - 3
                        token = first + index * dilation
                        T.copy(rows[(step * batch + k) % slots, r * tile : (r + 1) * tile], row[0, :])
                        conv_tile.normalize(row, 0, rstds[3 + k], x)
                        if has_bits:
                            is_there = [(are_there >> (k * 3 + tap)) & 1 == 1 for tap in range(3)]
                        else:
                            start = starts[k] if is_packed else 0
                            is_there = [token - (tap + 1) * dilation >= start for tap in range(3)]
                        conv_tile.convolve(filters, x, before, is_there, y)
                        if has_residual:
                            T.copy(residual_rows[(step * batch + k) % residual_slots, r * tile : (r + 1) * tile], added)
                            conv_tile.silu_and_residual(y, row, 0, added, result)
                        else:
                            conv_tile.silu(y, result)
                        if index >= 0 and index < count:
                            T.copy(result, out[token, stream, r * tile : (r + 1) * tile])
                        conv_tile.remember(before, x)

    return short_conv_rows
