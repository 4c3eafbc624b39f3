"""Benchmarks of fused_weight."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.gate.fused_weight import SPEC

test_bench = benchmarks(SPEC)
