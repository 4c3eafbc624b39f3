"""Benchmarks of inplace_unique_group_indices."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.mapping.inplace_unique_group_indices import SPEC

test_bench = benchmarks(SPEC)
