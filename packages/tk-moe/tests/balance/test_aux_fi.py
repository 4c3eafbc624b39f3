"""aux_fi."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import tk_core
import tk_moe
from tk_core import env
from tk_core.testing import tiers
from tk_moe.testing.balance.aux_fi import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


def test_by_hand() -> None:
    fi = tk_moe.aux_fi(torch.tensor([[2, 0], [-1, 2], [2, 4], [1, -7]]), 4, 2)
    assert fi.dtype == torch.float32
    assert fi.tolist() == [4 / 8, 4 / 8, 12 / 8, 0.0]
    assert tk_moe.aux_fi(torch.tensor([[2, 0], [-7, 4]], dtype=torch.int32), 3, 2).tolist() == [3 / 4, 0.0, 3 / 4]


def test_even_load_is_one() -> None:
    topk_idx = torch.arange(96).view(16, 6) % 12
    assert tk_moe.aux_fi(topk_idx, 12, 6).tolist() == [1.0] * 12


def test_no_tokens() -> None:
    assert tk_moe.aux_fi(torch.empty(0, 8, dtype=torch.int64), 3, 8).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_aux_topk"), [(3, 7, 3), (1001, 13, 4), (70001, 1023, 31)])
def test_products_are_rounded_to_float32_and_divided_once(num_tokens: int, num_experts: int, num_aux_topk: int) -> None:
    topk_idx = torch.randint(0, 2, (num_tokens, 4)) * (num_experts - 1)
    fi = tk_moe.aux_fi(topk_idx, num_experts, num_aux_topk)
    count = int((topk_idx == 0).sum())
    # numpy's float32 of an int rounds to nearest even; the quotient of two float32 in float64, rounded again, is exact
    # enough: twice 24 bits and two more are 50.
    numerator, divisor = np.float32(count * num_experts), np.float32(num_tokens * num_aux_topk)
    quotient = np.float32(float(Fraction(float(numerator)) / Fraction(float(divisor))))
    assert fi[0].item() == quotient


def test_debug_mode_finds_an_index_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_moe.aux_fi(torch.tensor([[2, -1]]), 3, 2)
    with pytest.raises(ValueError, match=r"topk_idx.*num_experts = 3.*3"):
        tk_moe.aux_fi(torch.tensor([[3, -1]]), 3, 2)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"topk_idx": [[0]]}, TypeError, "topk_idx.*Tensor"),
        ({"topk_idx": torch.zeros(4, 2, dtype=torch.int16)}, TypeError, "topk_idx.*int64.*int32.*int16"),
        ({"topk_idx": torch.zeros(4, dtype=torch.int64)}, ValueError, "topk_idx.*shape"),
        ({"topk_idx": torch.zeros(4, 3, dtype=torch.int64)[:, :2]}, ValueError, "topk_idx.*contiguous"),
        ({"topk_idx": torch.zeros(4, 0, dtype=torch.int64)}, ValueError, "topk_idx.*1 to 32"),
        ({"num_experts": 0}, ValueError, "num_experts.*1 to 1024"),
        ({"num_experts": "4"}, TypeError, "num_experts.*int"),
        ({"num_aux_topk": 0}, ValueError, "num_aux_topk.*1 to 32"),
        ({"num_aux_topk": 33}, ValueError, "num_aux_topk.*1 to 32"),
        ({"num_aux_topk": None}, TypeError, "num_aux_topk.*int"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    good = {"topk_idx": torch.zeros(4, 2, dtype=torch.int64), "num_experts": 4, "num_aux_topk": 2}
    with pytest.raises(error, match=match):
        tk_moe.aux_fi(**{**good, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [None, 100, 8, 1])
def test_gpu_bits_do_not_depend_on_the_number_of_blocks(num_sms: int | None) -> None:
    topk_idx = torch.randint(-1, 256, (8001, 8), device="cuda")
    with tk_core.num_sms(num_sms):
        for _ in range(25):
            assert torch.equal(tk_moe.aux_fi(topk_idx, 256, 8), tk_moe.reference.aux_fi(topk_idx, 256, 8))
