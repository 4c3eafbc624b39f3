"""Speed of cast_back."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.cast_back import SPEC

test_bench = benchmarks(SPEC)
