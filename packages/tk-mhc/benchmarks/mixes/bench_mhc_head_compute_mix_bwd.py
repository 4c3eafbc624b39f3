"""Benchmarks of mhc_head_compute_mix_bwd."""

from tk_core.testing.bench import benchmarks
from tk_mhc.testing.mixes.mhc_head_compute_mix_bwd import SPEC

test_bench = benchmarks(SPEC)
