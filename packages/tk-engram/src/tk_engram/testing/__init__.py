"""Named cases of each op, shared by tests, benchmarks and `tk warmup`."""
