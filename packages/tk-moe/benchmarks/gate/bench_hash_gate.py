"""Benchmarks of hash_gate."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.gate.hash_gate import SPEC

test_bench = benchmarks(SPEC)
