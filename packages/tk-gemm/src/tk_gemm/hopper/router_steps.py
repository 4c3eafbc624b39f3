"""Steps of the router's product, which fix its arithmetic. Only the kernels import this."""

from typing import NamedTuple

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from tk_core.macros import ring
from tk_core.macros.ring import Ring
from tk_gemm.hopper.router_config import BANK_ROW, RUN


class Stages(NamedTuple):
    """The stages of the ring in shared memory; the first dimension is the stage."""

    x: T.Buffer  # bfloat16 (stages, block_m, 64)
    weight: T.Buffer  # float32 (stages, 2, block_n, 32)


class Tile(NamedTuple):
    """Where a tile of scores begins, each an int32 (1) in registers."""

    token: T.Buffer
    expert: T.Buffer


def stages(count: int, block_m: int, block_n: int) -> Stages:
    """The stages of a tile's operands."""
    weight = T.alloc_shared((count, RUN // BANK_ROW, block_n, BANK_ROW), "float32")
    T.annotate_layout({weight: make_full_bank_swizzled_layout(weight)})
    return Stages(T.alloc_shared((count, block_m, RUN), "bfloat16"), weight)


def tile(index: T.PrimExpr, num_experts: T.PrimExpr, block_m: int, block_n: int) -> Tile:
    """The tile of a number; those of the same tokens follow each other."""
    num_n = T.ceildiv(num_experts, block_n)
    token, expert = T.truncdiv(index, num_n) * block_m, T.truncmod(index, num_n) * block_n
    return Tile(T.alloc_var("int32", init=token), T.alloc_var("int32", init=expert))


def begin(share: T.PrimExpr, size: T.PrimExpr, num_shares: T.PrimExpr) -> T.PrimExpr:
    """Where a share begins, of `size` things in `num_shares` shares: ⌊share · size / num_shares⌋."""
    return T.truncdiv(share * size, num_shares)


def row_of(i: T.PrimExpr) -> T.PrimExpr:
    """Which row of a tile of weights is row i of its product: of each eight the even ones, then the odd ones.

    A warp reads four of these rows at a time. TMA's swizzle puts neighbours' channels into the same banks in pairs.
    """
    return i // 8 * 8 + i % 4 * 2 + i % 8 // 4


@T.macro
def load(x: T.Buffer, weight: T.Buffer, tile: Tile, run: T.PrimExpr, to: Stages, r: Ring) -> None:
    """In the loading warp: load a run of channels into the ring."""
    rows = slice(tile.token[0], tile.token[0] + to.x.shape[1])
    experts = slice(tile.expert[0], tile.expert[0] + to.weight.shape[2])
    stage = ring.wait_empty(r)
    for part in T.unroll(RUN // BANK_ROW):
        channel = run * RUN + part * BANK_ROW
        ring.load(r, weight[experts, channel : channel + BANK_ROW], to.weight[stage, part, :, :])
    ring.load(r, x[rows, run * RUN : (run + 1) * RUN], to.x[stage, :, :])
    ring.fill(r)


@T.macro
def split(w_tile: T.Buffer, stage: T.PrimExpr, parts: T.Buffer) -> None:
    """parts[0] + parts[1] + parts[2] = a stage's float32 weights, each with 8 of their 24 bits, the highest first.

    All of an infinity is in the first part.
    """
    high, middle, low = (T.alloc_fragment(parts[0].shape, "float32") for _ in range(3))
    for i, c in T.Parallel(*parts[0].shape):
        value = w_tile[stage, c // BANK_ROW, row_of(i), c % BANK_ROW]
        high[i, c] = _cut(value)
        rest = T.if_then_else(T.abs(value) == T.infinity("float32"), T.float32(0), value - _cut(value))
        middle[i, c] = _cut(rest)
        low[i, c] = rest - _cut(rest)
    T.copy(high, parts[0])
    T.copy(middle, parts[1])
    T.copy(low, parts[2])


def _cut(value: T.PrimExpr) -> T.PrimExpr:
    """A float32 with 8 significant bits: the others are cut off, not rounded, so that no finite one overflows."""
    return T.reinterpret(T.reinterpret(value, "uint32") & T.uint32(0xFFFF0000), "float32")


@T.macro
def multiply(x_tile: T.Buffer, stage: T.PrimExpr, parts: T.Buffer, sums: T.Buffer) -> None:
    """sums = a run's product; the small parts first, while the sums have room for their bits."""
    for index in (2, 1, 0):
        T.wgmma_gemm(
            parts[index],
            x_tile[stage, :, :],
            sums,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=index == 2,
        )
    T.wait_wgmma(0)


@T.macro
def add(sums: T.Buffer, addend: T.Buffer) -> None:
    """sums += addend, both in registers or the latter in shared memory, as wide as it may be."""
    for i, j in T.Parallel(*sums.shape):
        sums[i, j] = addend[i, j] + sums[i, j]


@T.macro
def store(sums: T.Buffer, out: T.Buffer, part: T.PrimExpr, tile: Tile) -> None:
    """out[part] = a tile of sums, as far as there are tokens and experts, one quarter of the tokens after another."""
    num_tokens, num_experts = out.shape[1:]
    block_m = sums.shape[1]
    quarter = max(block_m // 4, 8)
    for first in range(0, block_m, quarter):
        for i, j in T.Parallel(*sums.shape):
            token, expert = tile.token[0] + j, tile.expert[0] + row_of(i)
            if j // quarter == first // quarter and token < num_tokens and expert < num_experts:
                out[part, token, expert] = sums[i, j]
