"""Benchmarks of topk_gate."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.gate.topk_gate import SPEC

test_bench = benchmarks(SPEC)
