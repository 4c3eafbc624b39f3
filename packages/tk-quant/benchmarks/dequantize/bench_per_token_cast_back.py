"""Speed of per_token_cast_back."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.dequantize.per_token_cast_back import SPEC

test_bench = benchmarks(SPEC)
