"""Benchmarks of get_fused_mapping."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.mapping.get_fused_mapping import SPEC

test_bench = benchmarks(SPEC)
