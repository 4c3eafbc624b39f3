"""Speed of swiglu_forward_and_per_channel_cast_and_transpose."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.swiglu.swiglu_forward_and_per_channel_cast_and_transpose import SPEC

test_bench = benchmarks(SPEC)
