"""Benchmarks of m_grouped_bf16_gemm_nt_masked."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.lib.peers import deep_gemm
from tk_gemm.testing.m_grouped.m_grouped_bf16_gemm_nt_masked import SPEC

test_bench = benchmarks(SPEC, deep_gemm("m_grouped_bf16_gemm_nt_masked"))
