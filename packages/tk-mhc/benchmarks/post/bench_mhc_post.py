"""Benchmarks of mhc_post."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.post.mhc_post import SPEC

test_bench = benchmarks(SPEC)
