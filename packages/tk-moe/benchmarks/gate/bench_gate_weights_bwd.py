"""Benchmarks of gate_weights_bwd."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.gate.gate_weights_bwd import SPEC

test_bench = benchmarks(SPEC)
