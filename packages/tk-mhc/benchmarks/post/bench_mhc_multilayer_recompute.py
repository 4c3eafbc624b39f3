"""Benchmarks of mhc_multilayer_recompute."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.post.mhc_multilayer_recompute import SPEC

test_bench = benchmarks(SPEC)
