"""Benchmarks of mhc_prenorm_gemm."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.projection.mhc_prenorm_gemm import SPEC

test_bench = benchmarks(SPEC)
