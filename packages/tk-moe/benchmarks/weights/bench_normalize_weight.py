"""Benchmarks of normalize_weight."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.weights.normalize_weight import SPEC

test_bench = benchmarks(SPEC)
