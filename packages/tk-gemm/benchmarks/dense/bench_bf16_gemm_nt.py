"""Benchmarks of bf16_gemm_nt."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.dense.bf16_gemm_nt import SPEC
from tk_gemm.testing.lib.peers import MM, deep_gemm

test_bench = benchmarks(SPEC, deep_gemm("bf16_gemm_nt") | MM)
