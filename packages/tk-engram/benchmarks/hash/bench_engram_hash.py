"""Benchmarks of engram_hash."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.hash.engram_hash import SPEC

test_bench = benchmarks(SPEC)
