"""Benchmarks of sinkhorn_normalize."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.mixes.sinkhorn_normalize import SPEC

test_bench = benchmarks(SPEC)
