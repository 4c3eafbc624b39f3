"""Benchmarks of topk_sum_and_topk_group_idx."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.gate.topk_sum_and_topk_group_idx import SPEC

test_bench = benchmarks(SPEC)
