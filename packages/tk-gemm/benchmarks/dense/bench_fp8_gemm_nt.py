"""Benchmarks of fp8_gemm_nt."""

from tk_core.testing.bench import benchmarks
from tk_gemm.testing.dense.fp8_gemm_nt import SPEC
from tk_gemm.testing.lib.peers import SCALED_MM, deep_gemm

test_bench = benchmarks(SPEC, deep_gemm("fp8_gemm_nt") | SCALED_MM)
