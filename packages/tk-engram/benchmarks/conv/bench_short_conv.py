"""Benchmarks of short_conv."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.conv.short_conv import SPEC

test_bench = benchmarks(SPEC)
