"""Named cases and input makers of each op, one module an op; tests and benchmarks import these."""
