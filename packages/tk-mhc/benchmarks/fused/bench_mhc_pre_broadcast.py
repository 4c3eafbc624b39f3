"""Benchmarks of mhc_pre_broadcast."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.fused.mhc_pre_broadcast import SPEC

test_bench = benchmarks(SPEC)
