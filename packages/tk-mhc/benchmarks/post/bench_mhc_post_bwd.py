"""Benchmarks of mhc_post_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.post.mhc_post_bwd import SPEC

test_bench = benchmarks(SPEC)
