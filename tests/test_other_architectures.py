"""Each kernel compiles for the later architectures, too; the ops' own tests compile all code paths for the first."""

import pytest

from tk_core.testing import load_specs, tiers

# Few enough that several processes share the tests evenly: one run of nvcc compiles all kernels of a test.
_COMPILED_TOGETHER = 16
_OPS = list(load_specs())
_GROUPS = [_OPS[start : start + _COMPILED_TOGETHER] for start in range(0, len(_OPS), _COMPILED_TOGETHER)]


@pytest.mark.compile
@pytest.mark.parametrize("ops", _GROUPS, ids=[f"{ops[0]}-and-{len(ops) - 1}-more" for ops in _GROUPS])
def test_compiles(ops: list[str]) -> None:
    specs = load_specs()
    tiers.check_other_architectures([specs[op] for op in ops])
