"""Benchmarks of k_grouped_fp8_gemm_nt_contiguous."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.k_grouped.k_grouped_fp8_gemm_nt_contiguous import SPEC
from tk_gemm.testing.lib.peers import deep_gemm_k_grouped

test_bench = benchmarks(SPEC, deep_gemm_k_grouped())
