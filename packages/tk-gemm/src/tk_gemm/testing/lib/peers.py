"""Products of other libraries, called with the arguments of ours for benchmarks; DeepGEMM where it is installed."""

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk_core.testing.specs import Call, Peer

Pair = tuple[Tensor, Tensor]


def deep_gemm(name: str) -> dict[str, Peer]:
    """DeepGEMM's function of this name, which takes the same arguments by position."""

    def peer(**kwargs: Any) -> Call:
        import deep_gemm

        used = {name: value for name, value in kwargs.items() if name != "use_psum_layout"}
        return partial(getattr(deep_gemm, name), *used.values())

    return {"deep_gemm": peer} if importlib.util.find_spec("deep_gemm") else {}


def deep_gemm_k_grouped() -> dict[str, Peer]:
    """DeepGEMM's gradients of experts' weights, which it adds to d."""

    def peer(a: Pair, b: Pair, d: Tensor, ks: list[int], **_: Any) -> Call:
        import deep_gemm

        sizes = torch.tensor(ks, dtype=torch.int32, device=d.device)
        return lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, sizes, d)

    return {"deep_gemm": peer} if importlib.util.find_spec("deep_gemm") else {}


def _scaled_mm(a: Pair, b: Pair, d: Tensor) -> Call:
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    a_sf = a[1].t().contiguous().t()
    b_sf = b[1].contiguous().t()
    return lambda: F.scaled_mm(a[0], b[0].t(), a_sf, recipes[0], b_sf, recipes[1], output_dtype=d.dtype)


def _grouped_mm(a: Tensor, b: Tensor, grouped_layout: Tensor, **_: Any) -> Call:
    counts = torch.bincount(grouped_layout[grouped_layout >= 0], minlength=len(b))
    ends = counts.cumsum(0).int()  # The benchmarks' groups have no padding between them.
    return lambda: F.grouped_mm(a, b.mT, offs=ends)


def _k_grouped_mm(a: Tensor, b: Tensor, ks: list[int], **_: Any) -> Call:
    ends = torch.tensor(ks, device=a.device).cumsum(0).int()
    return lambda: F.grouped_mm(a.t(), b, offs=ends)


def _mm(a: Tensor, b: Tensor, d: Tensor, **_: Any) -> Call:
    return lambda: torch.mm(a, b.t(), out=d)


SCALED_MM: dict[str, Peer] = {"scaled_mm": _scaled_mm}
GROUPED_MM: dict[str, Peer] = {"grouped_mm": _grouped_mm}
K_GROUPED_MM: dict[str, Peer] = {"grouped_mm": _k_grouped_mm}
MM: dict[str, Peer] = {"mm": _mm}
