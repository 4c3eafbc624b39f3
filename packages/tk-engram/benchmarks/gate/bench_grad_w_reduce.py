"""Benchmarks of grad_w_reduce."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.gate.grad_w_reduce import SPEC

test_bench = benchmarks(SPEC)
