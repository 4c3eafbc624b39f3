"""Benchmarks of engram_sinkhorn_step_reduce."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.optimizer.engram_sinkhorn_step_reduce import SPEC

test_bench = benchmarks(SPEC)
