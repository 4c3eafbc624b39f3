"""Benchmarks of mhc_fold_fn."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.projection.mhc_fold_fn import SPEC

test_bench = benchmarks(SPEC)
