"""Benchmarks of engram_gate_bwd."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.gate.engram_gate_bwd import SPEC

test_bench = benchmarks(SPEC)
