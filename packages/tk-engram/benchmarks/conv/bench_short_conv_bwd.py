"""Benchmarks of short_conv_bwd."""

from tk_core.testing.bench import benchmarks
from tk_engram.testing.conv.short_conv_bwd import SPEC

test_bench = benchmarks(SPEC)
