"""Benchmarks of mhc_post_pre."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.fused.mhc_post_pre import SPEC

test_bench = benchmarks(SPEC)
