"""A tile's way through K in FP8: the tensor cores take the factors, packed UE8M0, in words of four steps' bytes.

With groups along K a word may have bytes of two groups, which both load it: words are counted from the beginning of K.
A group without channels has a step of zeros, data and words, where byte 0 is the factor 2⁻¹²⁷: its sums are 0.
"""

from typing import NamedTuple

import tilelang.language as T

from tk_core.macros import ring
from tk_core.macros.ring import Ring
from tk_gemm.blackwell.sums import Sums
from tk_gemm.blackwell.tiles import BLOCK
from tk_gemm.device import tensor_maps
from tk_gemm.kernels import BLOCK_K
from tk_gemm.scheduler import Tile

_WORD_STEPS = 4
_LANES = 32


class Operands(NamedTuple):
    """What is multiplied, in global memory. With groups along K, A and B are one group."""

    a: T.Buffer  # e4m3 (groups, M, K)
    a_sf: T.Buffer  # int32 (groups, words, M)
    b: T.Buffer  # e4m3 (groups, N, K)
    b_sf: T.Buffer  # int32 (groups, words, N), or (groups, words, ⌈N/128⌉)
    b_is_per_row: bool
    by_k: bool  # groups are ranges of K
    maps: "tuple[T.Buffer, T.Buffer] | None" = None  # int64 (groups, 16), by which groups of A and B are loaded, if any


class Stages(NamedTuple):
    """The stages of the ring in shared memory; the first dimension is the stage. Only some have words."""

    a: T.Buffer  # e4m3 (stages, 128, 128)
    b: T.Buffer  # e4m3 (stages, columns, 128)
    a_words: T.Buffer  # int32 (stages, 128)
    b_words: tuple[T.Buffer, ...]  # int32 (stages, 128), of each 128 columns
    arranged: T.Buffer  # barriers: the stage's words are in the order of tensor memory


class Factors(NamedTuple):
    """Words in tensor memory, of which the tensor cores take a step's byte."""

    a: T.Buffer  # int32 (128, 4)
    b: tuple[T.Buffer, ...]  # int32 (128, 4), of each 128 columns


def stages(count: int, num_parts: int) -> Stages:
    """Stages for tiles of 128 · num_parts columns."""
    return Stages(
        T.alloc_shared((count, BLOCK, BLOCK_K), "float8_e4m3fn"),
        T.alloc_shared((count, BLOCK * num_parts, BLOCK_K), "float8_e4m3fn"),
        T.alloc_shared((count, BLOCK), "int32"),
        tuple(T.alloc_shared((count, BLOCK), "int32") for _ in range(num_parts)),
        T.alloc_barrier([_LANES] * count),
    )


def factors(num_parts: int) -> Factors:
    """Room for the factors of a tile of 128 · num_parts columns."""
    b = (T.alloc_tmem([BLOCK, 4], "int32") for _ in range(num_parts))
    return Factors(T.alloc_tmem([BLOCK, 4], "int32"), tuple(b))


@T.macro
def load(tile: Tile, x: Operands, to: Stages, r: Ring) -> None:
    """In the loading warp: load a tile's operands, and words of factors where they are for each row."""
    if x.maps is not None:
        for maps in x.maps:
            tensor_maps.acquire(maps[tile.group[0], :])
    for index in T.serial(tile.num_steps[0]):
        step = tile.first_step[0] + index
        group = 0 if x.by_k else tile.group[0]
        rows = slice(tile.row[0], tile.row[0] + to.a.shape[1])
        cols = slice(tile.col[0], tile.col[0] + to.b.shape[1])
        channels = slice(step * BLOCK_K, (step + 1) * BLOCK_K)
        ring.wait_empty(r)
        if _has_words(index, step):
            word = T.truncdiv(step, _WORD_STEPS)
            ring.load(r, x.a_sf[group, word, rows], to.a_words[r.stage[0], :])
            if x.b_is_per_row:
                ring.load(r, x.b_sf[tile.weights[0], word, cols], to.b_words[0][r.stage[0], :])
        if x.maps is not None:
            tensor_maps.load(r, x.maps[0][tile.group[0], :], rows, channels, to.a[r.stage[0], :, :])
            tensor_maps.load(r, x.maps[1][tile.group[0], :], cols, channels, to.b[r.stage[0], :, :])
        else:
            ring.load(r, x.a[group, rows, channels], to.a[r.stage[0], :, :])
            ring.load(r, x.b[tile.weights[0], cols, channels], to.b[r.stage[0], :, :])
        ring.fill(r)


@T.macro
def arrange(tile: Tile, x: Operands, to: Stages, r: Ring) -> None:
    """In the arranging warp: put words into the order of tensor memory, and write those of B's 128 × 128 blocks.

    That is 4 words in each of 32 lanes: row r's goes to [r % 32, r // 32].
    """
    for index in T.serial(tile.num_steps[0]):
        step = tile.first_step[0] + index
        ring.wait_full(r)
        if _has_words(index, step):
            T.tcgen05_sf_warp_transpose(to.a_words[r.stage[0], :])
            for part, words in enumerate(to.b_words):
                if x.b_is_per_row:
                    T.tcgen05_sf_warp_transpose(words[r.stage[0], :])
                else:
                    _repeat(tile, x, part, step, words, r.stage[0])
            T.fence_proxy_async()
        T.mbarrier_arrive(to.arranged[r.stage[0]])
        ring.move_on(r)


@T.macro
def multiply(tile: Tile, stages: Stages, r: Ring, f: Factors, s: Sums) -> None:
    """In the multiplying warp: begin a tile's products, the first of which begins the sums."""
    T.mbarrier_wait_parity(s.taken[0], s.parity[0] ^ 1)
    for index in T.serial(tile.num_steps[0]):
        step = tile.first_step[0] + index
        ring.wait_full(r)
        T.mbarrier_wait_parity(stages.arranged[r.stage[0]], r.parity[0])
        if _has_words(index, step):
            T.tcgen05_cp_warpx4(stages.a_words[r.stage[0], :], f.a)
            for part, words in enumerate(stages.b_words):
                T.tcgen05_cp_warpx4(words[r.stage[0], :], f.b[part])
        for part, acc in enumerate(s.parts):
            T.tcgen05_gemm_blockscaled(
                stages.a[r.stage[0], :, :],
                stages.b[r.stage[0], part * BLOCK : part * BLOCK + BLOCK, :],
                acc,
                f.a,
                f.b[part],
                transpose_B=True,
                # The last product releases the stage.
                mbar=r.empty[r.stage[0]] if part == len(s.parts) - 1 else None,
                clear_accum=index == 0,
                k_start=step * BLOCK_K,
                sf_a_granularity_k=BLOCK_K,
                sf_b_granularity_k=BLOCK_K,
            )
        ring.move_on(r)
    T.tcgen05_mma_arrive(s.summed[0])


def _has_words(index: T.PrimExpr, step: T.PrimExpr) -> T.PrimExpr:
    """Whether a stage has words: those of a tile's first step, and then of every fourth one."""
    return T.Or(index == 0, T.truncmod(step, _WORD_STEPS) == 0)


@T.macro
def _repeat(tile: Tile, x: Operands, part: int, step: T.PrimExpr, words: T.Buffer, stage: T.PrimExpr) -> None:
    """Write the word of a block of 128 columns once for each of them."""
    word = T.alloc_var("int32")
    block = T.truncdiv(T.min(tile.col[0] + part * BLOCK, x.b.shape[1] - 1), 128)
    word = x.b_sf[tile.weights[0], T.truncdiv(step, _WORD_STEPS), block]
    for lane in T.unroll(BLOCK // _LANES):
        words[stage, lane * _LANES + T.get_thread_binding() % _LANES] = word
