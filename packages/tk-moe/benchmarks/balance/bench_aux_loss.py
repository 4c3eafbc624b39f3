"""Benchmarks of aux_loss and aux_loss_bwd."""

from tk_core.testing.bench import benchmarks
from tk_moe.testing.balance.aux_loss import BWD_SPEC, SPEC

test_bench = benchmarks(SPEC)
test_bwd_bench = benchmarks(BWD_SPEC)
