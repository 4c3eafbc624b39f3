"""Speed of per_token_and_channel_cast."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.per_channel.per_token_and_channel_cast import SPEC

test_bench = benchmarks(SPEC)
