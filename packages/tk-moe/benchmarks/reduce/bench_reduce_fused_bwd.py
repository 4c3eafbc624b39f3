"""Benchmarks of reduce_fused_bwd."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.reduce.reduce_fused_bwd import SPEC

test_bench = benchmarks(SPEC)
