"""Products of other libraries, called with the arguments of ours for benchmarks; DeepGEMM where it is installed."""

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tk_gemm
import tk_quant
from tk_core.testing.specs import Call, Peer

Pair = tuple[Tensor, Tensor]


def _deep_gemm(name: str) -> dict[str, Peer]:
    """DeepGEMM's function of this name, which takes the same arguments by position."""

    def peer(**kwargs: Any) -> Call:
        import deep_gemm

        used = {name: value for name, value in kwargs.items() if name != "use_psum_layout"}
        return partial(getattr(deep_gemm, name), *used.values())

    return {"deep_gemm": peer} if importlib.util.find_spec("deep_gemm") else {}


def _deep_gemm_k_grouped() -> dict[str, Peer]:
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


def _float32_mm(x: Tensor, weight: Tensor, d: Tensor) -> Call:
    return lambda: torch.mm(x.float(), weight.t(), out=d)


def _two_ops(a: Pair, b: Pair, grouped_layout: Tensor, **_: Any) -> Call:
    """The two ops that m_grouped_fp8_gemm_swiglu_nt_contiguous replaces: the product, then SwiGLU with the cast."""

    def call() -> Any:
        x = tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, grouped_layout)
        return tk_quant.swiglu_forward_and_per_token_cast(
            x, "e4m3", 128, pos_to_expert=grouped_layout, use_tma_aligned_col_major_sf=True
        )

    return call


PEERS: dict[str, dict[str, Peer]] = {
    "tk_gemm.fp8_gemm_nt": {**_deep_gemm("fp8_gemm_nt"), "scaled_mm": _scaled_mm},
    "tk_gemm.bf16_gemm_nt": {**_deep_gemm("bf16_gemm_nt"), "mm": _mm},
    "tk_gemm.router_gemm_nt": {"float32_mm": _float32_mm},
    "tk_gemm.m_grouped_fp8_gemm_nt_contiguous": _deep_gemm("m_grouped_fp8_gemm_nt_contiguous"),
    "tk_gemm.m_grouped_fp8_gemm_nt_masked": _deep_gemm("m_grouped_fp8_gemm_nt_masked"),
    "tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous": {"two_ops": _two_ops},
    "tk_gemm.m_grouped_bf16_gemm_nt_contiguous": {
        **_deep_gemm("m_grouped_bf16_gemm_nt_contiguous"),
        "grouped_mm": _grouped_mm,
    },
    "tk_gemm.m_grouped_bf16_gemm_nt_masked": _deep_gemm("m_grouped_bf16_gemm_nt_masked"),
    "tk_gemm.k_grouped_fp8_gemm_nt_contiguous": _deep_gemm_k_grouped(),
    "tk_gemm.k_grouped_bf16_gemm_tn_contiguous": {"grouped_mm": _k_grouped_mm},
}
"""By op, then by name of the peer."""
