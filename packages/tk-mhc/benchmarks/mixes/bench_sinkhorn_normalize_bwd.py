"""Benchmarks of sinkhorn_normalize_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.mixes.sinkhorn_normalize_bwd import SPEC

test_bench = benchmarks(SPEC)
