"""Shared by tests and benchmarks: cases of the modules and the checks that each has to pass."""
