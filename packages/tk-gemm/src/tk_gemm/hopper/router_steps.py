"""Steps of the router's product, which fix its arithmetic. Only the kernels import this."""

import tilelang.language as T

from tk_gemm.hopper.router_config import BANK_ROW, RUN


def row_of(i: T.PrimExpr) -> T.PrimExpr:
    """Which row of a tile of weights is row i of its product: of each eight the even ones, then the odd ones.

    A warp reads four of these rows at a time. TMA's swizzle puts neighbours' channels into the same banks in pairs.
    """
    return i // 8 * 8 + i % 4 * 2 + i % 8 // 4


@T.macro
def load(
    x: T.Buffer,
    weight: T.Buffer,
    x_tile: T.Buffer,
    w_tile: T.Buffer,
    full: T.Buffer,
    slot: T.PrimExpr,
    token: T.PrimExpr,
    expert: T.PrimExpr,
    run: T.PrimExpr,
) -> None:
    """Begin to load a run of channels into a stage of the ring."""
    for part in T.unroll(RUN // BANK_ROW):
        channel = run * RUN + part * BANK_ROW
        weights = weight[expert : expert + w_tile.shape[2], channel : channel + BANK_ROW]
        T.tma_copy(weights, w_tile[slot, part, :, :], barrier=full[slot], leader_scope_threads=32)
    rows = x[token : token + x_tile.shape[1], run * RUN : (run + 1) * RUN]
    T.tma_copy(rows, x_tile[slot, :, :], barrier=full[slot], leader_scope_threads=32)
    if T.shuffle_elect(32):
        T.mbarrier_arrive(full[slot])


@T.macro
def split(w_tile: T.Buffer, slot: T.PrimExpr, parts: T.Buffer) -> None:
    """parts[0] + parts[1] + parts[2] = a stage's float32 weights, each with 8 of their 24 bits, the highest first.

    All of an infinity is in the first part.
    """
    high, middle, low = (T.alloc_fragment(parts[0].shape, "float32") for _ in range(3))
    for i, c in T.Parallel(*parts[0].shape):
        value = w_tile[slot, c // BANK_ROW, row_of(i), c % BANK_ROW]
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
def multiply(x_tile: T.Buffer, slot: T.PrimExpr, parts: T.Buffer, sums: T.Buffer) -> None:
    """sums = a run's product; the small parts first, while the sums have room for their bits."""
    for index in (2, 1, 0):
        T.wgmma_gemm(
            parts[index],
            x_tile[slot, :, :],
            sums,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=index == 2,
        )
    T.wait_wgmma(0)


@T.macro
def next_slot(slot: T.Buffer, num_stages: int) -> None:
    """Move on slot = [stage of the ring, parity of the round]."""
    slot[0] += 1
    if slot[0] == num_stages:
        slot[0] = 0
        slot[1] = slot[1] ^ 1


@T.macro
def add(sums: T.Buffer, addend: T.Buffer) -> None:
    """sums += addend, both in registers or the latter in shared memory, as wide as it may be."""
    for i, j in T.Parallel(*sums.shape):
        sums[i, j] = addend[i, j] + sums[i, j]


@T.macro
def store(sums: T.Buffer, out: T.Buffer, part: T.PrimExpr, token: T.PrimExpr, expert: T.PrimExpr) -> None:
    """out[part] = a tile of sums, as far as there are tokens and experts, one quarter of the tokens after another."""
    _, num_tokens, num_experts = out.shape
    block_m = sums.shape[1]
    quarter = max(block_m // 4, 8)
    for first in range(0, block_m, quarter):
        for i, j in T.Parallel(*sums.shape):
            if j // quarter == first // quarter and token + j < num_tokens and expert + row_of(i) < num_experts:
                out[part, token + j, expert + row_of(i)] = sums[i, j]
