"""Benchmarks of bf16_gemm_nt."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.dense.bf16_gemm_nt import SPEC

test_bench = benchmarks(SPEC)
