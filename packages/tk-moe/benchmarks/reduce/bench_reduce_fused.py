"""Benchmarks of reduce_fused."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.reduce.reduce_fused import SPEC

test_bench = benchmarks(SPEC)
