"""Benchmarks of aux_fi."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.balance.aux_fi import SPEC

test_bench = benchmarks(SPEC)
