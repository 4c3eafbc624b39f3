"""What tests and benchmarks share: cases of the modules and the checks that each has to pass."""
