"""Speed of transpose and batched_transpose."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.layout.transpose import BATCHED_SPEC, SPEC

test_bench = benchmarks(SPEC)
test_batched_bench = benchmarks(BATCHED_SPEC)
