"""Benchmarks of k_grouped_bf16_gemm_tn_contiguous."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.k_grouped.k_grouped_bf16_gemm_tn_contiguous import SPEC

test_bench = benchmarks(SPEC)
