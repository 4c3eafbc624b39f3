"""Benchmarks of mhc_pre_norm_fn_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.projection.mhc_pre_norm_fn_bwd import SPEC

test_bench = benchmarks(SPEC)
