"""Benchmarks of ngram_windows."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.hash.ngram_windows import SPEC

test_bench = benchmarks(SPEC)
