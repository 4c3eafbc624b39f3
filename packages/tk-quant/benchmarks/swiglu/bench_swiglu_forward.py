"""Speed of swiglu_forward."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.swiglu.swiglu_forward import SPEC

test_bench = benchmarks(SPEC)
