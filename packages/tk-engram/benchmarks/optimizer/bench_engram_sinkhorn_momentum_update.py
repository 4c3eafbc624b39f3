"""Benchmarks of engram_sinkhorn_momentum_update."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.optimizer.engram_sinkhorn_momentum_update import SPEC

test_bench = benchmarks(SPEC)
