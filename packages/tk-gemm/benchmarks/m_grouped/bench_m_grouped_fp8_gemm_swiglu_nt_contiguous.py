"""Benchmarks of m_grouped_fp8_gemm_swiglu_nt_contiguous, beside the two ops that it replaces."""

from typing import Any

from torch import Tensor

import tk_gemm
import tk_quant
from tk_core.testing.bench import benchmarks
from tk_core.testing.specs import Call
from tk_gemm.testing.m_grouped.m_grouped_fp8_gemm_swiglu_nt_contiguous import SPEC

Pair = tuple[Tensor, Tensor]


def two_ops(a: Pair, b: Pair, grouped_layout: Tensor, **_: Any) -> Call:
    """The product, in bfloat16, then SwiGLU with the cast."""

    def call() -> Any:
        x = tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, grouped_layout)
        return tk_quant.swiglu_forward_and_per_token_cast(
            x, "e4m3", 128, pos_to_expert=grouped_layout, use_tma_aligned_col_major_sf=True
        )

    return call


test_bench = benchmarks(SPEC, {"two_ops": two_ops})
