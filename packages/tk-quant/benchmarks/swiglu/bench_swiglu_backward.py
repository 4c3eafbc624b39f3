"""Speed of swiglu_backward."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.swiglu.swiglu_backward import SPEC

test_bench = benchmarks(SPEC)
