"""Benchmarks of engram_lookup_bwd."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.lookup.engram_lookup_bwd import SPEC

test_bench = benchmarks(SPEC)
