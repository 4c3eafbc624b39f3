"""Benchmarks of mhc_pre_norm_fn."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.projection.mhc_pre_norm_fn import SPEC

test_bench = benchmarks(SPEC)
