"""Benchmarks of k_grouped_bf16_gemm_tn_contiguous."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.k_grouped.k_grouped_bf16_gemm_tn_contiguous import SPEC
from tk_gemm.testing.lib.peers import K_GROUPED_MM

test_bench = benchmarks(SPEC, K_GROUPED_MM)
