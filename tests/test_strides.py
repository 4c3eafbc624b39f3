"""Strides that the caller chooses reach kernels with 64 bits: as 32, one of 2³¹ elements or more would be negative."""

from collections import defaultdict

import pytest

from tk_core.arch import ARCHS
from tk_core.kernel import KernelRequest, capture
from tk_core.testing import load_specs
from tk_core.testing.usage import build

MOST_OF_A_BUILDER = 4
"""Kernels that are built of each builder; the others differ in sizes and formats."""


def _requests(package: str) -> list[KernelRequest]:
    found: dict[str, dict[KernelRequest, None]] = defaultdict(dict)
    for spec in load_specs(package).values():
        for case in spec.cases:
            for name in (case.archs or spec.archs) if case.compile else ():
                with capture(ARCHS[name]) as captured:
                    spec.op(**case.make("meta"))
                for request in captured:
                    found[request.kernel.name][request] = None
    return [request for of_one in found.values() for request in list(of_one)[:MOST_OF_A_BUILDER]]


@pytest.mark.parametrize("package", ["tk_engram", "tk_gemm", "tk_indexer", "tk_mhc", "tk_moe", "tk_quant"])
def test_strides_have_64_bits(package: str) -> None:
    for request in _requests(package):
        for buffer in build(request.kernel, *request.args).buffer_map.values():
            free = [x for x in buffer.strides if hasattr(x, "name") and not any(map(x.same_as, buffer.shape))]
            assert {x.dtype for x in free} <= {"int64"}, f"{request}: {buffer.name} has strides {free}"
