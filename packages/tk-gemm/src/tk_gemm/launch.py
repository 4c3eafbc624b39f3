"""Launches of the products' kernels, on the architecture that the operands are on."""

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
from tk_gemm.hopper.bf16 import bf16_product_kernel
from tk_gemm.hopper.fp8 import fp8_product_kernel
from tk_gemm.hopper.gather_groups import gather_groups_kernel
from tk_gemm.hopper.swiglu import fp8_swiglu_product_kernel
from tk_gemm.hopper.tiles import BY_K, WIDE, Problem, bf16_tile, fp8_tile
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


def launch_fp8(
    op: str, x: Fp8Operands, groups: Groups, c: Tensor | None, d: Tensor, b_is_per_row: bool = False
) -> None:
    """Launch d = a · bᵀ (+ c) for (M, K) and (N, K), or (G, M, K) and (groups, N, K).

    With `b_is_per_row`, for packed factors only, b_sf has N rows instead of ⌈N/128⌉.
    """
    arch = arch_of_factors(op, x.a_sf)
    a, a_sf, b, b_sf, d = (for_tma(_grouped(each)) for each in (x.a, x.a_sf.mT, x.b, x.b_sf.mT, d))
    c = None if c is None else for_tma(_grouped(c))
    num_groups, num_rows, num_cols = d.shape
    num_sms = get_num_sms(d.device)
    if arch.has_tcgen05:
        launch = fp8_product_blackwell_kernel(groups.kind, d.dtype, b_is_per_row, c is not None, arch)
        b_sf = b_sf if b_is_per_row else _grouped(x.b_sf.mT)
        launch(a, a_sf, b, b_sf, groups.layout, c, d, _num_blocks(d, BLOCK, BLOCK, num_sms))
        return
    expected = min(groups.num_rows or num_rows, num_rows)
    tile = fp8_tile(Problem(num_groups, expected, num_rows, num_cols, a.shape[2], b.shape[0]), num_sms)
    by_tma = takes_tma(a_sf)
    addend = _addend(c, d)
    launch = fp8_product_kernel(groups.kind, tile, d.dtype, by_tma, addend, arch)
    a_sf = a_sf if by_tma else _grouped(x.a_sf.mT)
    num_blocks = _num_blocks(d, tile.block_m, tile.block_n, num_sms)
    launch(a, a_sf, b, x.b_sf.contiguous().view(-1), groups.layout, c, d, num_blocks)


def launch_fp8_by_k(op: str, x: Fp8Operands, ends: Tensor, c: Tensor | None, d: Tensor) -> None:
    """Launch for a (M, K), b (N, K), their factors (K/128, M) and (K/128, N), ends (G) along K, c and d (G, M, N).

    Packed factors are (⌈K/512⌉, M) and (⌈K/512⌉, N).
    """
    arch = arch_of_factors(op, x.a_sf)
    operands = [for_tma(_grouped(each)) for each in (x.a, x.a_sf, x.b, x.b_sf)]
    c, d = None if c is None else for_tma(c), for_tma(d)
    if arch.has_tcgen05:
        launch, block_m, block_n = fp8_product_blackwell_kernel("k", d.dtype, True, c is not None, arch), BLOCK, BLOCK
    else:
        launch = fp8_product_kernel("k", BY_K, d.dtype, True, _addend(c, d), arch)
        block_m, block_n = BY_K.block_m, BY_K.block_n
    launch(*operands, ends, c, d, _num_blocks(d, block_m, block_n, get_num_sms(d.device)))


def launch_fp8_swiglu(
    op: str, x: Fp8Operands, groups: Groups, routing: Routing, clamp: float | None, data: Tensor, sf: Tensor
) -> None:
    """Launch SwiGLU of a (M, K) times interleaved b (groups, 2 · I, K), cast to data (M, I) and sf (M, blocks of I)."""
    arch = arch_of_factors(op, x.a_sf)
    num_tiles = ceil_div(x.a.shape[0], WIDE.block_m) * ceil_div(x.b.shape[1], WIDE.block_n)
    a, a_sf, b = for_tma(_grouped(x.a)), for_tma(_grouped(x.a_sf.mT)), for_tma(x.b)
    variant = routing.weights is not None, clamp is not None
    scalars = clamp or 0.0, min(num_tiles, get_num_sms(data.device))
    if arch.has_tcgen05:
        launch = fp8_swiglu_product_blackwell_kernel(groups.kind, *variant, arch)
        launch(a, a_sf, b, x.b_sf.mT, groups.layout, *routing, data, sf.mT.view(torch.uint8), *scalars)
    else:
        by_tma = takes_tma(a_sf)
        launch = fp8_swiglu_product_kernel(groups.kind, by_tma, *variant, arch)
        a_sf, b_sf = a_sf if by_tma else _grouped(x.a_sf.mT), x.b_sf.contiguous().view(-1)
        launch(a, a_sf, b, b_sf, groups.layout, *routing, for_tma(_grouped(data)), sf.mT, *scalars)


def launch_bf16(op: str, x: Bf16Operands, groups: Groups, c: Tensor | None, d: Tensor) -> None:
    """Launch d = a · bᵀ (+ c) of operands as they lie; with kind "k" only c and d have groups: (G, M, N)."""
    arch = hopper_or_blackwell(op, x.a)
    a, b, d = (for_tma(_grouped(each)) for each in (x.a, x.b, d))
    c = None if c is None else for_tma(_grouped(c))
    num_groups, num_rows, num_cols = d.shape
    num_sms = get_num_sms(d.device)
    variant = d.dtype, x.a_is_transposed, x.b_is_transposed, c is not None
    if arch.has_tcgen05:
        launch, block_m, block_n = bf16_product_blackwell_kernel(groups.kind, *variant, arch), BLOCK, BLOCK
    else:
        tile = bf16_tile(num_groups, min(groups.num_rows or num_rows, num_rows), num_cols, num_sms)
        launch = bf16_product_kernel(groups.kind, tile, *variant[:3], _addend(c, d), arch)
        block_m, block_n = tile.block_m, tile.block_n
    launch(a, b, groups.layout, c, d, _num_blocks(d, block_m, block_n, num_sms))


def gather_groups(op: str, x: Fp8Operands, ends: Tensor) -> Fp8Operands:
    """Operands whose groups (M, K_g) and (N, K_g) lie one after the other, copied side by side: (M, ΣK) and (N, ΣK)."""
    launch = gather_groups_kernel(arch_of_factors(op, x.a_sf))
    copies = []
    for flat, num_rows in zip((x.a, x.b), x.shape):
        total = flat.numel() // num_rows
        copies.append(flat.new_empty((num_rows, total + 128))[:, :total])  # No row stride is a power of two.
        launch(flat.view(torch.int32), ends, copies[-1].view(torch.int32))
    return x._replace(a=copies[0], b=copies[1], a_sf=x.a_sf.t(), b_sf=x.b_sf.t())


def hopper_or_blackwell(op: str, x: Tensor) -> Arch:
    """The architecture of x's device; UnsupportedArchError, with the op's name, unless it is Hopper or Blackwell."""
    arch = get_arch(x.device)
    if not (arch.has_wgmma or arch.has_tcgen05):
        raise UnsupportedArchError(op, arch.name, "sm_90a, sm_100a, or the reference backend")
    return arch


def arch_of_factors(op: str, sf: Tensor) -> Arch:
    """The architecture of sf's device; UnsupportedArchError unless Hopper for float32, Blackwell for packed factors."""
    arch = get_arch(sf.device)
    is_packed = not sf.is_floating_point()
    if not (arch.has_tcgen05 if is_packed else arch.has_wgmma):
        found = f"{arch.name} and {'packed UE8M0' if is_packed else 'float32'} scale factors"
        raise UnsupportedArchError(op, found, "float32 on sm_90a, packed ones on sm_100a, or the reference backend")
    return arch


def _addend(c: Tensor | None, d: Tensor) -> Addend | None:
    """Where the kernels on Hopper find what is added."""
    if c is None:
        return None
    return "d" if c.data_ptr() == d.data_ptr() and d.dtype == torch.float32 else "c"


def _grouped(x: Tensor) -> Tensor:
    """x with a dimension for groups in front."""
    return x if x.ndim == 3 else x.unsqueeze(0)


def _num_blocks(d: Tensor, block_m: int, block_n: int, num_sms: int) -> int:
    num_groups, num_rows, num_cols = d.shape
    return min(num_sms, num_groups * ceil_div(num_rows, block_m) * ceil_div(num_cols, block_n))
