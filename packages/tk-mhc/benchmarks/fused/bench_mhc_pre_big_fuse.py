"""Benchmarks of mhc_pre_big_fuse."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.fused.mhc_pre_big_fuse import SPEC

test_bench = benchmarks(SPEC)
