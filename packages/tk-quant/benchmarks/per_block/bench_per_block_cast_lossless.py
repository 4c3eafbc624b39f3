"""Speed of per_block_cast_lossless."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.per_block.per_block_cast_lossless import SPEC

test_bench = benchmarks(SPEC)
