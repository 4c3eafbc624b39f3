"""Benchmarks of engram_sinkhorn_step."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.optimizer.engram_sinkhorn_step import SPEC

test_bench = benchmarks(SPEC)
