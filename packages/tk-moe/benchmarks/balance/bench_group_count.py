"""Benchmarks of group_count."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.balance.group_count import SPEC

test_bench = benchmarks(SPEC)
