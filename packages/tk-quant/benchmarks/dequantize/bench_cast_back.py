"""Speed of cast_back."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.dequantize.cast_back import E5M6_SPEC, SPEC

test_bench = benchmarks(SPEC)
test_bench_e5m6 = benchmarks(E5M6_SPEC)
