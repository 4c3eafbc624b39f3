"""mhc_pre_norm_fn_bwd: gradients of `mhc_pre_norm_fn` by the residual, by fn and by the norm weight.

With F = fn · norm_weight, x the m·H channels of a token, R the rows of fn and g[t, j] = rstd[t] · d_mixes[t, j]:

    d_residual[t, c]  = Σ_j g[t, j] · F[j, c] - x[t, c] · rstd[t]² / (m·H) · Σ_j d_mixes[t, j] · mixes[t, j]
    d_F[j, c]         = Σ_t g[t, j] · x[t, c]
    d_fn[j, c]        = d_F[j, c] · norm_weight[c]
    d_norm_weight[c]  = Σ_j d_F[j, c] · fn[j, c]

The residual is read once, for both products. Three kernels:

1. `prepare`: per token g and the factor of x.
2. `backward`: a thread block takes some channels and a range of tokens. It keeps F's channels in shared memory and
   walks the range, 64 tokens at a time; tiles arrive and leave by TMA where there is TMA:

       x tile (64 tokens × channels) ──┬── d_F += xᵀ · g ─────────────── partial sum of the range
       g tile (64 tokens × R) ─────────┴── d_residual tile = g · F + factor · x (+ what was there)

3. `finish`: adds up the ranges' d_F, ascending, and computes d_fn and d_norm_weight from it.

Arithmetic: tensor cores multiply bfloat16 and add in float32. x is exact in bfloat16; g and F, which are float32,
become sums of two bfloat16, high and low, which hold 16 of 24 bits: d_F is x · high + x · low, and of the four products
of g · F the one of the low parts is left out. The number of ranges does not depend on the number of SMs, so no bit of a
sum does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import given_or_new, launching, new, op
from tk_core.views import flat
from tk_mhc.lib.tokens import check_fn, check_norm_weight, check_streams

_PREPARE_TOKENS = 8
"""Tokens of a thread block of the first kernel, sixteen threads each."""
_FINISH_CHANNELS = 64
"""Channels of a thread block of the last kernel."""
_PARTS = 2
"""High and low."""
_COPY_THREADS = 128
"""Threads that TileLang adds to start the copies."""
_COPY_REGISTERS = 40
"""Registers that each of them keeps."""


def padded_rows(num_rows: int) -> int:
    """Rows of F as tensor cores take them, 16 at a time; zeros beyond the last."""
    return align(num_rows, 16)


@dataclass(frozen=True)
class MhcPreNormFnBwdConfig:
    """Launch knobs of the kernel that reads the residual."""

    block_channels: int
    """Channels of a thread block; it divides m·H."""
    num_ranges: int
    """Ranges of tokens. It decides the order of d_F's sums, so it must not depend on the number of SMs."""
    num_stages: int
    """Tiles in flight; 0: none while one is worked on."""
    threads: int
    """Threads that calculate; if there are stages, there are others beside them that start the copies."""
    blocks_per_sm: int
    """Thread blocks that are to fit on an SM."""
    block_tokens: int = 64
    """Tokens of a tile. Like num_ranges it decides the order of d_F's sums."""

    @property
    def registers(self) -> int:
        """Registers of a thread that calculates, where others start the copies and leave it theirs."""
        threads = self.threads + _COPY_THREADS
        at_launch = 65536 // (threads * self.blocks_per_sm) // 8 * 8
        return min(240, (threads * at_launch - _COPY_THREADS * _COPY_REGISTERS) // self.threads // 8 * 8)

    def shared_bytes(self, num_rows: int, has_d_residual: bool) -> int:
        """Shared memory of a thread block's tiles."""
        row_bytes = 2 * self.block_channels
        rows = padded_rows(num_rows)
        stage_bytes = self.block_tokens * (row_bytes * (1 + has_d_residual) + 2 * _PARTS * rows)
        return max(self.num_stages, 1) * stage_bytes + (_PARTS * rows + self.block_tokens) * row_bytes

    @staticmethod
    def best(width: int, num_rows: int, has_d_residual: bool, arch: Arch) -> "MhcPreNormFnBwdConfig":
        """All thread blocks run at once on 132 SMs if m·H is small enough. Untuned.

        Then no SM idles while the last ones finish, and there are few partial sums. With up to 32 rows a thread has
        registers for 128 channels; with more, Hopper shares these among twice as many threads, and other GPUs take half
        the channels.
        """
        few_rows = num_rows <= 32
        block_channels = 128 if few_rows or arch.has_wgmma else 64
        threads = 128 if few_rows or not arch.has_wgmma else 256
        blocks_per_sm = 2 if few_rows and arch.max_shared_memory >= 160 * 1024 else 1
        num_ranges = max(1, min(32, 132 * blocks_per_sm * block_channels // width))
        for num_stages in (3, 2, 1):
            config = MhcPreNormFnBwdConfig(block_channels, num_ranges, num_stages, threads, blocks_per_sm)
            room = arch.shared_memory_each(blocks_per_sm) - 1024  # for barriers and the alignment of tiles
            if arch.has_tma and config.shared_bytes(num_rows, has_d_residual) <= room:
                return config
        return MhcPreNormFnBwdConfig(block_channels, num_ranges, 0, threads, blocks_per_sm)


@kernel
def _prepare_kernel(num_rows: int, width: int, arch: Arch) -> Any:
    """g = rstd · d_mixes in two parts, side by side, each padded with zeros; factor: that of x in d_residual."""
    import tilelang.language as T

    block_tokens = _PREPARE_TOKENS
    rows = padded_rows(num_rows)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def prepare(
        d_mixes: T.Tensor((num_tokens, num_rows), "float32"),
        mixes: T.Tensor((num_tokens, num_rows), "float32"),
        rstd: T.Tensor((num_tokens,), "float32"),
        g: T.Tensor((num_tokens, _PARTS * rows), "bfloat16"),
        factor: T.Tensor((num_tokens,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_tokens), threads=16 * block_tokens) as block:
            first_token = block * block_tokens
            products = T.alloc_fragment((block_tokens, rows), "float32")
            dots = T.alloc_fragment((block_tokens,), "float32")
            T.annotate_layout({products: T.Fragment((block_tokens, rows), lambda t, j: (t * 16 + j % 16, j // 16))})
            for t, j in T.Parallel(block_tokens, rows):
                token, row = first_token + t, T.min(j, num_rows - 1)
                gradient = T.if_then_else(j < num_rows, d_mixes[token, row], T.float32(0))
                scaled = rstd[token] * gradient
                high = T.cast(scaled, "bfloat16")
                g[token, j] = high
                g[token, rows + j] = T.cast(scaled - T.cast(high, "float32"), "bfloat16")
                products[t, j] = gradient * mixes[token, row]
            T.reduce_sum(products, dots, dim=1)
            for t in T.Parallel(block_tokens):
                factor[first_token + t] = -(rstd[first_token + t] * rstd[first_token + t] / width * dots[t])

    return prepare


@kernel
def _backward_kernel(
    num_rows: int, width: int, has_norm_weight: bool, has_d_residual: bool, config: MhcPreNormFnBwdConfig, arch: Arch
) -> Any:
    """d_residual, and d_F's sum over each range of tokens, from high and from low parts of g separately."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    block_channels, block_tokens = config.block_channels, config.block_tokens
    rows = padded_rows(num_rows)
    num_tokens = T.dynamic("num_tokens")
    num_partials = T.dynamic("num_partials")
    # The last product of a tile waits for all; only Hopper's are asynchronous.
    unfinished = {"wg_wait": -1}

    @T.prim_func
    def backward(
        residual: T.Tensor((num_tokens, width), "bfloat16"),
        fn: T.Tensor((num_rows, width), "float32"),
        norm_weight: T.Tensor((width,), "float32"),
        g: T.Tensor((num_tokens, _PARTS * rows), "bfloat16"),
        factor: T.Tensor((num_tokens,), "float32"),
        before: T.Tensor((num_tokens, width), "bfloat16"),
        d_residual: T.Tensor((num_tokens, width), "bfloat16"),
        partials: T.Tensor((num_partials, _PARTS, num_rows, width), "float32"),
    ) -> None:
        with T.Kernel(width // block_channels, num_partials, threads=config.threads) as (block, token_range):
            if config.num_stages > 0 and config.blocks_per_sm > 1:
                T.annotate_min_blocks_per_sm(config.blocks_per_sm)
                T.annotate_producer_reg_dealloc(_COPY_REGISTERS)
                T.annotate_consumer_reg_alloc(config.registers)
            x_tile = T.alloc_shared((block_tokens, block_channels), "bfloat16")
            before_tile = T.alloc_shared((block_tokens, block_channels), "bfloat16")
            g_tile = T.alloc_shared((block_tokens, _PARTS * rows), "bfloat16")
            high = T.alloc_shared((rows, block_channels), "bfloat16")
            low = T.alloc_shared((rows, block_channels), "bfloat16")
            d_x_tile = T.alloc_shared((block_tokens, block_channels), "bfloat16")
            factors = T.alloc_fragment((block_tokens,), "float32")
            d_x = T.alloc_fragment((block_tokens, block_channels), "float32")
            d_f = T.alloc_fragment((block_channels, _PARTS * rows), "float32")

            # No product sets this tile's layout; without one, its rows of 256 bytes would all begin in the same bank.
            T.annotate_layout({before_tile: make_full_bank_swizzled_layout(before_tile)})

            first_channel = block * block_channels
            for j, c in T.Parallel(rows, block_channels):
                row, channel = T.min(j, num_rows - 1), first_channel + c
                weight = fn[row, channel] * norm_weight[channel] if has_norm_weight else fn[row, channel]
                f = T.if_then_else(j < num_rows, weight, T.float32(0))
                high[j, c] = T.cast(f, "bfloat16")
                low[j, c] = T.cast(f - T.cast(T.cast(f, "bfloat16"), "float32"), "bfloat16")
            T.clear(d_f)

            num_tiles = T.ceildiv(num_tokens, block_tokens)
            tiles_per_range = T.ceildiv(num_tiles, config.num_ranges)
            first_tile = token_range * tiles_per_range
            for i in T.Pipelined(T.min(tiles_per_range, num_tiles - first_tile), num_stages=config.num_stages):
                token = (first_tile + i) * block_tokens
                tile = (slice(token, token + block_tokens), slice(first_channel, first_channel + block_channels))
                T.copy(residual[tile], x_tile)
                T.copy(g[token : token + block_tokens, :], g_tile)
                if has_d_residual:
                    T.copy(before[tile], before_tile)
                # Not by T.copy: TileLang 0.1.15 would have the loading warps fill registers of their own.
                for t in T.Parallel(block_tokens):
                    factors[t] = factor[T.min(token + t, num_tokens - 1)]
                T.gemm(x_tile, g_tile, d_f, transpose_A=True, policy=T.GemmWarpPolicy.FullRow, annotations=unfinished)
                T.gemm(g_tile[:, 0:rows], low, d_x, clear_accum=True, annotations=unfinished)
                T.gemm(g_tile[:, rows : 2 * rows], high, d_x, annotations=unfinished)
                T.gemm(g_tile[:, 0:rows], high, d_x)
                for t, c in T.Parallel(block_tokens, block_channels):
                    d_x[t, c] = T.fma(T.cast(x_tile[t, c], "float32"), factors[t], d_x[t, c])
                if has_d_residual:
                    for t, c in T.Parallel(block_tokens, block_channels):
                        d_x[t, c] = d_x[t, c] + T.cast(before_tile[t, c], "float32")
                T.copy(d_x, d_x_tile)
                T.copy(d_x_tile, d_residual[tile])
            for c, j in T.Parallel(block_channels, _PARTS * rows):
                if j % rows < num_rows:
                    partials[token_range, j // rows, j % rows, first_channel + c] = d_f[c, j]

    return backward


@kernel
def _finish_kernel(num_rows: int, width: int, has_norm_weight: bool, arch: Arch) -> Any:
    import tilelang.language as T

    block_channels = _FINISH_CHANNELS
    rows = padded_rows(num_rows)
    num_partials = T.dynamic("num_partials")

    @T.prim_func
    def finish(
        partials: T.Tensor((num_partials, _PARTS, num_rows, width), "float32"),
        fn: T.Tensor((num_rows, width), "float32"),
        norm_weight: T.Tensor((width,), "float32"),
        d_fn: T.Tensor((num_rows, width), "float32"),
        d_norm_weight: T.Tensor((width,), "float32"),
    ) -> None:
        with T.Kernel(width // block_channels, threads=128) as block:
            first_channel = block * block_channels
            d_f = T.alloc_fragment((rows, block_channels), "float32")
            terms = T.alloc_fragment((rows, block_channels), "float32")
            d_weights = T.alloc_fragment((block_channels,), "float32")
            T.clear(d_f)
            for p in T.serial(num_partials):
                for j, c in T.Parallel(rows, block_channels):
                    row, channel = T.min(j, num_rows - 1), first_channel + c
                    d_f[j, c] = d_f[j, c] + (partials[p, 0, row, channel] + partials[p, 1, row, channel])
            for j, c in T.Parallel(rows, block_channels):
                channel = first_channel + c
                if j < num_rows:
                    d_fn[j, channel] = d_f[j, c] * norm_weight[channel] if has_norm_weight else d_f[j, c]
            if has_norm_weight:
                for j, c in T.Parallel(rows, block_channels):
                    row, channel = T.min(j, num_rows - 1), first_channel + c
                    terms[j, c] = T.if_then_else(j < num_rows, d_f[j, c] * fn[row, channel], T.float32(0))
                T.reduce_sum(terms, d_weights, dim=0)
                T.copy(d_weights, d_norm_weight[first_channel : first_channel + block_channels])

    return finish


@op(writes=("d_residual",))
def mhc_pre_norm_fn_bwd(
    d_mixes: Tensor,
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mixes: Tensor,
    rstd: Tensor,
    *,
    d_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `mhc_pre_norm_fn` by the residual, by mhc_fn and by mhc_norm_weight.

    With F = mhc_fn · mhc_norm_weight and x the m·H channels of a token: d_residual = rstd · Σ_j d_mixes_j · F_j -
    x · rstd² / (m·H) · Σ_j d_mixes_j · mixes_j; with d_F = Σ_t rstd · d_mixesᵀ · x: d_fn = d_F · mhc_norm_weight and
    d_norm_weight = Σ_j d_F_j · mhc_fn_j. Source: arXiv 2512.24880. Sums are float32. A token's d_residual does not
    depend on the other tokens, and no gradient on the number of SMs.

    Args:
        d_mixes: gradient by mixes, float32 (..., rows of mhc_fn), contiguous.
        residual: bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        mhc_fn: float32 (m·(m+2), m·H), (2m, m·H) without comb, or (m, m·H) for the head; contiguous.
        mhc_norm_weight: float32 (m·H), contiguous, or None for ones.
        mixes: float32 (..., rows of mhc_fn), contiguous, as `mhc_pre_norm_fn` returned it.
        rstd: float32 (...), contiguous, as `mhc_pre_norm_fn` returned it.
        d_residual: bfloat16 (..., m, H), contiguous: a gradient that this one is added to, in float32, rounded once, in
            place, of no other argument's memory; None for a new tensor.

    Returns:
        d_residual: bfloat16 (..., m, H): the given one, if one was given.
        d_fn: float32, as mhc_fn; zeros if there is no token.
        d_norm_weight: float32 (m·H), None without mhc_norm_weight; zeros if there is no token.

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, or m or H is out of range.
    """
    float32 = (torch.float32,)
    streams = check_streams("residual", residual)
    leading, device = streams.leading, streams.device
    num_rows, width = check_fn("mhc_fn", mhc_fn, streams), streams.width
    check_norm_weight("mhc_norm_weight", mhc_norm_weight, streams)
    check.tensor("d_mixes", d_mixes, float32, (*leading, num_rows), device=device)
    check.tensor("mixes", mixes, float32, (*leading, num_rows), device=device)
    check.tensor("rstd", rstd, float32, leading, device=device)
    accumulate = d_residual is not None
    d_residual = given_or_new("d_residual", d_residual, residual, residual.shape)
    d_fn = new(mhc_fn.new_empty, mhc_fn.shape)
    d_norm_weight = None if mhc_norm_weight is None else new(mhc_norm_weight.new_empty, (width,))
    if not launching(d_residual, d_fn, d_norm_weight):
        return d_residual, d_fn, d_norm_weight
    if residual.numel() == 0:
        return d_residual, d_fn.zero_(), None if d_norm_weight is None else d_norm_weight.zero_()

    x, d_x, arch = residual.view(-1, width), d_residual.view(-1, width), get_arch(device)
    num_tokens, has_norm_weight = x.shape[0], mhc_norm_weight is not None
    config = MhcPreNormFnBwdConfig.best(width, num_rows, accumulate, arch)
    g = x.new_empty((num_tokens, _PARTS * padded_rows(num_rows)))
    factor = rstd.new_empty((num_tokens,))
    _prepare_kernel(num_rows, width, arch)(flat(d_mixes, 1), flat(mixes, 1), rstd.view(-1), g, factor)

    num_tiles = ceil_div(num_tokens, config.block_tokens)
    num_partials = ceil_div(num_tiles, ceil_div(num_tiles, config.num_ranges))
    partials = mhc_fn.new_empty((num_partials, _PARTS, num_rows, width))
    backward = _backward_kernel(num_rows, width, has_norm_weight, accumulate, config, arch)
    backward(x, mhc_fn, mhc_norm_weight, g, factor, d_x if accumulate else None, d_x, partials)
    _finish_kernel(num_rows, width, has_norm_weight, arch)(partials, mhc_fn, mhc_norm_weight, d_fn, d_norm_weight)
    return d_residual, d_fn, d_norm_weight
