"""Speed of tk-engram's ops."""

from tk_core.testing import load_specs
from tk_core.testing.bench import benchmarks

test_bench = benchmarks(load_specs("tk_engram"))
