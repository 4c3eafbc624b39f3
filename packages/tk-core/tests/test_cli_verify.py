"""`tk verify --unchanged`: what counts as the same work on a GPU, and what is said of the rest."""

from typing import Any

import pytest
import torch

from tk_core.arch import Arch, arch_from_name, get_arch
from tk_core.cli.verify import why_changed
from tk_core.kernel import kernel
from tk_core.testing import Case, OpSpec
from tk_core.testing.fingerprints import fingerprint


def _double(size: int, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def double(x: T.Tensor((size,), "float32"), factor: T.float32) -> None:
        with T.Kernel(1, threads=32):
            for i in T.Parallel(size):
                x[i] = x[i] * T.float32(2) * factor

    return double


def _double_by_other_names(length: int, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def double(values: T.Tensor((length,), "float32"), scale: T.float32) -> None:
        """The same."""
        with T.Kernel(1, threads=32):
            for j in T.Parallel(length):
                values[j] = values[j] * T.float32(2) * scale

    return double


def _triple(size: int, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def double(x: T.Tensor((size,), "float32"), factor: T.float32) -> None:
        with T.Kernel(1, threads=32):
            for i in T.Parallel(size):
                x[i] = x[i] * T.float32(3) * factor

    return double


def _add_by(source: str, function: str) -> Any:
    def add(size: int, arch: Arch) -> Any:
        import tilelang.language as T

        @T.prim_func
        def add(x: T.Tensor((size,), "float32"), factor: T.float32) -> None:
            with T.Kernel(1, threads=32):
                T.import_source(source)
                for i in T.Parallel(size):
                    x[i] = T.call_extern("float32", function, x[i], factor)

        return add

    return add


def _fingerprint(build: Any, factor: float = 1.0, width: int = 64, compiled: bool = False, **options: Any) -> str:
    built = kernel(**options)(build)

    def op(x: torch.Tensor) -> None:
        built(64, get_arch(x.device))(x, factor)

    case = Case("case", lambda device: {"x": torch.empty(2, width, device=device)[:, :64]})
    return fingerprint(OpSpec(op, op, (case,)), case, arch_from_name("sm_90a"), compiled)


def test_names_and_docstrings_do_not_count() -> None:
    assert _fingerprint(_double) == _fingerprint(_double_by_other_names)


def test_cuda_counts_by_its_instructions_where_programs_differ() -> None:
    first = _add_by("#define add(a, b) ((a) + (b))\n", "add")
    same = _add_by("// Renamed.\n#define plus(a, b) ((b) + (a))\n", "plus")
    other = _add_by("#define add(a, b) ((a) - (b))\n", "add")
    assert _fingerprint(first) != _fingerprint(same)
    assert _fingerprint(first, compiled=True) == _fingerprint(same, compiled=True)
    assert _fingerprint(first, compiled=True) != _fingerprint(other, compiled=True)
    assert _fingerprint(first, compiled=True, width=72) != _fingerprint(first, compiled=True)


@pytest.mark.parametrize(
    "other",
    [
        {"build": _triple},
        {"build": _double, "factor": 2.0},
        {"build": _double, "width": 72},
        {"build": _double, "compile_flags": ("--use_fast_math",)},
        {"build": _double, "pass_configs": {"tl.disable_tma_lower": True}},
    ],
    ids=["constant", "scalar", "strides", "flags", "pass-config"],
)
def test_what_counts(other: dict[str, Any]) -> None:
    assert _fingerprint(**other) != _fingerprint(_double)


@pytest.mark.parametrize(
    ("before", "cases", "why"),
    [
        ("verified", {"a": "1", "b": "2"}, None),
        ("stale", {"a": "1", "b": "2"}, "its record was stale"),
        ("verified", {"a": "1", "b": "3"}, "other kernels or launches in b"),
        ("verified", {"a": "1"}, "without case b"),
        ("verified", {"a": "1", "b": "2", "c": "1"}, "with new case c"),
    ],
)
def test_why_a_record_does_not_hold(before: str, cases: dict[str, str], why: str | None) -> None:
    found = why_changed({"state": before, "cases": {"a": "1", "b": "2"}}, {"state": "stale", "cases": cases})
    assert found is None if why is None else why in found
