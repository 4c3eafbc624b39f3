"""Benchmarks of expand_to_mhc_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.expand.expand_to_mhc_bwd import SPEC

test_bench = benchmarks(SPEC)
