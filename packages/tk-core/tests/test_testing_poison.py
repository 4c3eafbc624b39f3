"""tk_core.testing.poison."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_core.testing import poison, poisoned_allocations

_X = torch.zeros(3, 4)
_ALLOCATIONS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "empty": lambda dtype: torch.empty(3, 4, dtype=dtype),
    "empty-like": lambda dtype: torch.empty_like(_X, dtype=dtype),
    "empty-strided": lambda dtype: torch.empty_strided((3, 4), (8, 1), dtype=dtype),
    "empty-permuted": lambda dtype: torch.empty_permuted((3, 4), (1, 0), dtype=dtype),
    "new-empty": lambda dtype: _X.new_empty((3, 4), dtype=dtype),
    "new-empty-strided": lambda dtype: _X.new_empty_strided((3, 4), (1, 4), dtype=dtype),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.int32, torch.bool)


def all_ones(x: torch.Tensor) -> bool:
    return all(byte == 0xFF for byte in bytes(x.untyped_storage()))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("name", _ALLOCATIONS)
def test_every_allocation_is_poisoned(name: str, dtype: torch.dtype) -> None:
    with poisoned_allocations():
        x = _ALLOCATIONS[name](dtype)
    assert not torch.overrides._get_current_function_mode_stack(), "it ends"
    assert x.untyped_storage().nbytes() >= 12 * dtype.itemsize
    assert all_ones(x)


def test_contents_that_are_asked_for_stay() -> None:
    with poisoned_allocations():
        assert not torch.zeros(3).any()
        assert not _X.clone().any()
        assert (_X + 1 == 1).all()


def test_ops_stay_on_their_eager_path() -> None:
    with poisoned_allocations():
        assert torch._C._len_torch_dispatch_stack() == 0
        assert type(torch.empty(3)) is torch.Tensor


def test_nothing_to_poison() -> None:
    with poisoned_allocations():
        assert torch.empty(3, device="meta").shape == (3,)
        assert torch.empty(0, 3).shape == (0, 3)
        with FakeTensorMode():
            assert torch.empty(3).shape == (3,)


def test_poison_fills_gaps_and_neighbours_in_the_storage() -> None:
    wide = torch.zeros(3, 8)
    assert poison(wide[:, 2:4]).isnan().all()
    assert all_ones(wide)
