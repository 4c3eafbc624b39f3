"""How many multiprocessors kernels may fill."""

from collections.abc import Iterator

import pytest
import torch

import tk_core
from tk_core.arch import arch_from_name, compiling_for

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _compiling() -> Iterator[None]:
    with compiling_for(arch_from_name("sm_90a")):
        yield
    tk_core.set_num_sms(None)


def test_limit() -> None:
    assert tk_core.get_device_num_sms(META) == tk_core.get_num_sms(META) == 132
    tk_core.set_num_sms(100)
    assert tk_core.get_num_sms(META) == 100
    assert tk_core.get_device_num_sms(META) == 132
    tk_core.set_num_sms(1000)
    assert tk_core.get_num_sms(META) == 132


def test_context_restores() -> None:
    tk_core.set_num_sms(50)
    with tk_core.num_sms(10):
        assert tk_core.get_num_sms(META) == 10
        with tk_core.num_sms(None):
            assert tk_core.get_num_sms(META) == 132
    assert tk_core.get_num_sms(META) == 50


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_input(count: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_sms: expected"):
        tk_core.set_num_sms(count)
    assert tk_core.get_num_sms(META) == 132


def test_cpu_has_none() -> None:
    with pytest.raises(ValueError, match="device: expected a CUDA device, got cpu"):
        tk_core.get_num_sms("cpu")
