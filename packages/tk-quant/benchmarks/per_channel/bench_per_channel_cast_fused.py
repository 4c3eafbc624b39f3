"""Speed of per_channel_cast_fused."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.per_channel.per_channel_cast_fused import SPEC

test_bench = benchmarks(SPEC)
