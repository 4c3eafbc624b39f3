"""Benchmarks of topk_gate_with_weights."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.gate.topk_gate_with_weights import SPEC

test_bench = benchmarks(SPEC)
