"""Benchmarks of mhc_pre_apply_mix."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.collapse.mhc_pre_apply_mix import SPEC

test_bench = benchmarks(SPEC)
