"""Speed of swiglu_forward_and_per_token_cast."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.swiglu.swiglu_forward_and_per_token_cast import SPEC

test_bench = benchmarks(SPEC)
