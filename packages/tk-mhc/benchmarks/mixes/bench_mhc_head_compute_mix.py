"""Benchmarks of mhc_head_compute_mix."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.mixes.mhc_head_compute_mix import SPEC

test_bench = benchmarks(SPEC)
