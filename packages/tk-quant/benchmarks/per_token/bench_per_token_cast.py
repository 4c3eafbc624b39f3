"""Speed of per_token_cast and its relatives with sf only and with precomputed sf."""

from tk_core.testing.bench import benchmarks
from tk_quant.testing.per_token.per_token_cast import SPEC, WITH_PRECOMPUTED_SF_SPEC, WITH_SF_ONLY_SPEC

test_bench = benchmarks(SPEC)
test_with_sf_only_bench = benchmarks(WITH_SF_ONLY_SPEC)
test_with_precomputed_sf_bench = benchmarks(WITH_PRECOMPUTED_SF_SPEC)
