"""Benchmarks of engram_lookup."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.lookup.engram_lookup import SPEC

test_bench = benchmarks(SPEC)
