"""Named cases and input makers of each op, one module per op, for tests and benchmarks."""
