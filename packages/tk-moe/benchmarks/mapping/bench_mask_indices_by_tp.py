"""Benchmarks of mask_indices_by_tp."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.mapping.mask_indices_by_tp import SPEC

test_bench = benchmarks(SPEC)
