"""tk_core.testing.launches: what counts as the same work on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.testing import Case, OpSpec, launches


def _scale(constant: float = 2, cuda: str = "// CUDA") -> Callable[..., Any]:
    def scale(size: int, arch: Arch) -> Any:
        import tilelang.language as T

        @T.prim_func
        def scale(x: T.Tensor((size,), "float32"), factor: T.float32) -> None:
            with T.Kernel(1, threads=32):
                T.import_source(cuda)
                for i in T.Parallel(size):
                    x[i] = x[i] * T.float32(constant) * factor

        return scale

    return scale


def _scale_by_other_names(length: int, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def scale(values: T.Tensor((length,), "float32"), by: T.float32) -> None:
        """The same."""
        with T.Kernel(1, threads=32):
            T.import_source("// CUDA")
            for j in T.Parallel(length):
                values[j] = values[j] * T.float32(2) * by

    return scale


def _hash(*builders: Any, factor: float = 1.0, width: int = 64, **options: Any) -> str:
    """Hash of a case that launches the builders' kernels with a factor, on rows `width` apart."""
    kernels = [kernel(**options)(build) for build in builders]

    def op(x: torch.Tensor) -> None:
        for each in kernels:
            each(64, get_arch(x.device))(x, factor)

    case = Case("case", lambda device: {"x": torch.empty(2, width, device=device)[:, :64]})
    return launches.case_hash(OpSpec(op, op, (case,)), case, "sm_90a")


def test_names_and_docstrings_do_not_count() -> None:
    assert _hash(_scale()) == _hash(_scale_by_other_names)


@pytest.mark.parametrize(
    ("builders", "options"),
    [
        ((_scale(3),), {}),
        ((_scale(cuda="// other"),), {}),
        ((), {}),
        ((_scale(), _scale()), {}),
        ((_scale(),), {"factor": 2.0}),
        ((_scale(),), {"width": 72}),
        ((_scale(),), {"compile_flags": ("--use_fast_math",)}),
        ((_scale(),), {"pass_configs": {"tl.disable_tma_lower": True}}),
    ],
    ids=["constant", "cuda", "no-launch", "twice", "scalar", "strides", "flags", "pass-config"],
)
def test_what_counts(builders: tuple[Any, ...], options: dict[str, Any]) -> None:
    assert _hash(*builders, **options) != _hash(_scale())


def test_the_order_of_launches_counts() -> None:
    assert _hash(_scale(2), _scale(3)) != _hash(_scale(3), _scale(2))
