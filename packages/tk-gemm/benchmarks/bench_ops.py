"""Speed of tk-gemm's ops, beside other libraries' products."""

from tk_core.testing import load_specs
from tk_core.testing.bench import benchmarks

from .peers import PEERS

test_bench = benchmarks(load_specs("tk_gemm"), PEERS)
