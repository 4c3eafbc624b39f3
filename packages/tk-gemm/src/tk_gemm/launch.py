"""Launches of the products' kernels, on the architecture that the operands are on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tk_core.arch import Arch, UnsupportedArchError, get_arch
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_gemm.blackwell.bf16 import bf16_product_blackwell_kernel
from tk_gemm.blackwell.fp8 import fp8_product_blackwell_kernel
from tk_gemm.blackwell.swiglu import fp8_swiglu_product_blackwell_kernel
from tk_gemm.blackwell.tiles import BLOCK
from tk_gemm.check import Bf16Operands, Fp8Operands
from tk_gemm.group_maps import group_maps_kernel
from tk_gemm.hopper.bf16 import bf16_product_kernel
from tk_gemm.hopper.fp8 import fp8_product_kernel
from tk_gemm.hopper.swiglu import fp8_swiglu_product_kernel
from tk_gemm.hopper.tiles import TILES, WIDE, Problem, TileShape, by_k_tile, fastest, tile_of_rows, widest_tile
from tk_gemm.kernels import Addend, Kind
from tk_gemm.tma import for_tma, takes_tma


class Groups(NamedTuple):
    """How rows are grouped: each group has its own weights."""

    kind: Kind = "dense"
    layout: Tensor | None = None
    """int32: a group for each row, where groups end, or the rows of each group."""
    num_rows: int | None = None
    """Rows of a group that the caller expects, only to choose the tile."""


class Routing(NamedTuple):
    """Which weight multiplies each row: pos_to_token_topk (M), and topk_weights flat; None without weights."""

    pos: Tensor | None
    weights: Tensor | None


def launch_fp8(op: str, x: Fp8Operands, groups: Groups, c: Tensor | None, d: Tensor) -> None:
    """Launch d = a · bᵀ (+ c) for (M, K) and (N, K), or (G, M, K) and (groups, N, K).

    With kind "k" only c and d have groups, and factors are column major: b's has N rows then, and where it is packed it
    may have them with any kind, else ⌈N/128⌉. Flat operands are groups (M, K_g), or (N, K_g), one after the other.
    """
    arch, addend, kind = _arch_of_factors(op, x.a_sf), _addend(c, d), groups.kind
    if x.a.ndim == 1:  # As matrices, but for the order of elements.
        x, kind = x._replace(a=x.a.view(x.shape[0], -1), b=x.b.view(x.shape[1], -1)), "k_flat"
    a, a_sf, b, c, d = (_for_tma(each) for each in (x.a, x.a_sf.mT, x.b, c, d))
    b_is_per_row = x.b_sf.shape[-2] == b.shape[1]
    if arch.has_tcgen05:
        launch = fp8_product_blackwell_kernel(kind, d.dtype, b_is_per_row, c is not None, arch)
        b_sf = (_for_tma if b_is_per_row else _grouped)(x.b_sf.mT)
        maps = _group_maps(x, groups.layout, BLOCK, BLOCK, arch) if kind == "k_flat" else (None, None)
        launch(a, a_sf, b, b_sf, groups.layout, *maps, c, d, _num_blocks(d, BLOCK, BLOCK))
        return
    problem, num_sms = _problem(groups, d.shape, a.shape[2], b), get_num_sms(d.device)
    tile = by_k_tile(problem, addend, num_sms) if b_is_per_row else tile_of_rows(kind, problem, num_sms)
    by_tma = takes_tma(a_sf)
    if kind == "k_flat":
        a, b = _group_maps(x, groups.layout, tile.block_m, tile.block_n, arch)
    launch = fp8_product_kernel(kind, tile, d.dtype, by_tma, addend, arch)
    a_sf = a_sf if by_tma else _grouped(x.a_sf.mT)
    b_sf = _for_tma(x.b_sf.mT) if b_is_per_row else x.b_sf.contiguous().view(-1)
    num_blocks = _num_blocks(d, tile.block_m, tile.block_n)
    launch(a, a_sf, b, b_sf, groups.layout, c, d, num_blocks, *_counter(tile, d))


def launch_fp8_swiglu(
    op: str, x: Fp8Operands, groups: Groups, routing: Routing, clamp: float | None, data: Tensor, sf: Tensor
) -> None:
    """Launch SwiGLU of a (M, K) times interleaved b (groups, 2 · I, K), cast to data (M, I) and sf (M, blocks of I)."""
    arch = _arch_of_factors(op, x.a_sf)
    num_rows, num_cols, num_sms = x.a.shape[0], x.b.shape[1], get_num_sms(data.device)
    a, a_sf, b = (_for_tma(each) for each in (x.a, x.a_sf.mT, x.b))
    variant = routing.weights is not None, clamp is not None
    scalars = clamp or 0.0, min(ceil_div(num_rows, WIDE.block_m) * ceil_div(num_cols, WIDE.block_n), num_sms)
    if arch.has_tcgen05:
        launch = fp8_swiglu_product_blackwell_kernel(groups.kind, *variant, arch)
        launch(a, a_sf, b, x.b_sf.mT, groups.layout, *routing, data, sf.mT.view(torch.uint8), *scalars)
    else:
        by_tma = takes_tma(a_sf)
        tile = widest_tile(groups.kind, _problem(groups, (1, num_rows, num_cols), x.a.shape[1], b), num_sms)
        launch = fp8_swiglu_product_kernel(groups.kind, tile, by_tma, *variant, arch)
        a_sf, b_sf = a_sf if by_tma else _grouped(x.a_sf.mT), x.b_sf.contiguous().view(-1)
        outputs = _for_tma(data), sf.mT
        launch(a, a_sf, b, b_sf, groups.layout, *routing, *outputs, *scalars, *_counter(tile, data))


def launch_bf16(op: str, x: Bf16Operands, groups: Groups, c: Tensor | None, d: Tensor) -> None:
    """Launch d = a · bᵀ (+ c) of operands as they lie; with kind "k" only c and d have groups: (G, M, N)."""
    arch = get_arch(x.a.device)
    if not (arch.has_wgmma or arch.has_tcgen05):
        raise UnsupportedArchError(op, arch.name, "sm_90a, sm_100a, or the reference backend")
    addend, variant = _addend(c, d), (d.dtype, x.a_is_transposed, x.b_is_transposed)
    a, b, c, d = (_for_tma(each) for each in (x.a, x.b, c, d))
    if arch.has_tcgen05:
        launch = bf16_product_blackwell_kernel(groups.kind, *variant, c is not None, arch)
        launch(a, b, groups.layout, c, d, _num_blocks(d, BLOCK, BLOCK))
        return
    num_channels, num_sms = a.shape[1 if x.a_is_transposed else 2], get_num_sms(d.device)
    problem = _problem(groups, d.shape, num_channels, b)
    # Boxes of few rows are for an A that lies along K: they would change how a transposed one lies in a stage.
    tile = fastest(TILES, problem, num_sms) if x.a_is_transposed else tile_of_rows(groups.kind, problem, num_sms)
    launch = bf16_product_kernel(groups.kind, tile, *variant, addend, arch)
    launch(a, b, groups.layout, c, d, _num_blocks(d, tile.block_m, tile.block_n), *_counter(tile, d))


def _counter(tile: TileShape, like: Tensor) -> list[Tensor]:
    """The counter of tiles that are taken on demand, if they are."""
    return [like.new_zeros(1, dtype=torch.int32)] if tile.on_demand else []


def _group_maps(x: Fp8Operands, ends: Tensor, block_m: int, block_n: int, arch: Arch) -> list[Tensor]:
    """Tensor maps of the groups of A and of B, for tiles of these sizes."""
    maps = [ends.new_empty((ends.shape[0], 16), dtype=torch.int64) for _ in range(2)]
    group_maps_kernel(block_m, block_n, arch)(x.a, x.b, ends, *maps)
    return maps


def _problem(groups: Groups, d_shape: Sequence[int], num_channels: int, b: Tensor) -> Problem:
    num_groups, num_rows, num_cols = d_shape
    expected, num_weights = min(groups.num_rows or num_rows, num_rows), b.shape[0]
    if groups.kind == "k":
        num_channels, num_weights = ceil_div(num_channels, num_groups), num_groups
    return Problem(num_groups, expected, num_rows, num_cols, num_channels, num_weights, b.itemsize)


def _arch_of_factors(op: str, sf: Tensor) -> Arch:
    """The architecture of sf's device; UnsupportedArchError unless Hopper for float32, Blackwell for packed factors."""
    arch = get_arch(sf.device)
    is_packed = not sf.is_floating_point()
    if not (arch.has_tcgen05 if is_packed else arch.has_wgmma):
        found = f"{arch.name} and {'packed UE8M0' if is_packed else 'float32'} scale factors"
        raise UnsupportedArchError(op, found, "float32 on sm_90a, packed ones on sm_100a, or the reference backend")
    return arch


def _addend(c: Tensor | None, d: Tensor) -> Addend | None:
    """Where the kernels on Hopper find what is added. Meta tensors, which are only planned for, have no addresses."""
    if c is None:
        return None
    is_d = c is d if d.is_meta else c.data_ptr() == d.data_ptr()
    return "d" if is_d and d.dtype == torch.float32 else "c"


def _grouped(x: Tensor) -> Tensor:
    """x with a dimension for groups in front."""
    return x if x.ndim == 3 else x.unsqueeze(0)


def _for_tma(x: Tensor | None) -> Tensor | None:
    """x with a dimension for groups in front, and strides that TMA accepts."""
    return None if x is None else for_tma(_grouped(x))


def _num_blocks(d: Tensor, block_m: int, block_n: int) -> int:
    num_groups, num_rows, num_cols = d.shape
    num_tiles = num_groups * ceil_div(num_rows, block_m) * ceil_div(num_cols, block_n)
    return min(num_tiles, get_num_sms(d.device))
