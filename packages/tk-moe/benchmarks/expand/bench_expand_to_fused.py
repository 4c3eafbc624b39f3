"""Benchmarks of expand_to_fused and expand_to_fused_with_sf."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.expand.expand_to_fused import SPEC, WITH_SF_SPEC

test_bench = benchmarks(SPEC)
test_with_sf_bench = benchmarks(WITH_SF_SPEC)
