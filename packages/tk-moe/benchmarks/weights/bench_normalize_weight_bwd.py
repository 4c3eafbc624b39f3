"""Benchmarks of normalize_weight_bwd."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.weights.normalize_weight_bwd import SPEC

test_bench = benchmarks(SPEC)
