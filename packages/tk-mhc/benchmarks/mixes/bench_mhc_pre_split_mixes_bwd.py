"""Benchmarks of mhc_pre_split_mixes_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.mixes.mhc_pre_split_mixes_bwd import SPEC

test_bench = benchmarks(SPEC)
