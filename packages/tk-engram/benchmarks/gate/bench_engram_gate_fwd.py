"""Benchmarks of engram_gate_fwd."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.gate.engram_gate_fwd import SPEC

test_bench = benchmarks(SPEC)
