"""Speed of unpack_from_e2m1fn_x2."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.dequantize.unpack_from_e2m1fn_x2 import SPEC

test_bench = benchmarks(SPEC)
