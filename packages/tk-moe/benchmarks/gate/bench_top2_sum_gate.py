"""Benchmarks of top2_sum_gate."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.gate.top2_sum_gate import SPEC

test_bench = benchmarks(SPEC)
