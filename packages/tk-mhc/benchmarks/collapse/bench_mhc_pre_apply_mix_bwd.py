"""Benchmarks of mhc_pre_apply_mix_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.collapse.mhc_pre_apply_mix_bwd import SPEC

test_bench = benchmarks(SPEC)
