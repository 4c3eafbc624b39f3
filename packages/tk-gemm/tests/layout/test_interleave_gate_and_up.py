"""interleave_gate_and_up."""

import pytest
import torch

import tk_gemm
from tk_core.testing.numeric import assert_equal

from ..inputs import weights


def test_by_hand() -> None:
    data = torch.arange(4.0).repeat_interleave(128).view(1, 512, 1).expand(1, 512, 128).to(torch.float8_e4m3fn)
    sf = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]])
    out, out_sf = tk_gemm.interleave_gate_and_up((data.contiguous(), sf))
    assert out.float()[0, ::128, 0].tolist() == [0, 2, 1, 3]
    assert out.float()[0, 127::128, 5].tolist() == [0, 2, 1, 3]
    assert out_sf.tolist() == [[[0.0], [2.0], [1.0], [3.0]]]


def test_packed_factors() -> None:
    data, sf = weights(512, 640, "cpu", 2, packed=True)
    _, out_sf = tk_gemm.interleave_gate_and_up((data, sf))
    assert_equal(out_sf, sf[:, [0, 2, 1, 3]].contiguous())


def test_results_are_new_tensors() -> None:
    """Also where one run of gate and one of up are in their order already."""
    b = torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 2).mT
    for before, after in zip(b, tk_gemm.interleave_gate_and_up(b), strict=True):
        assert after.data_ptr() != before.data_ptr()
        assert after.is_contiguous()


def test_bad_input() -> None:
    data, sf = weights(512, 128, "cpu", 2)
    for error, name, wrong in (
        (TypeError, "b", data),
        (TypeError, r"b\[0\]", (data.float(), sf)),
        (ValueError, r"b\[0\]", (data[:, :384].contiguous(), sf)),
        (ValueError, r"b\[1\]", (data, sf[:, :3])),
    ):
        with pytest.raises(error, match=f"^{name}"):
            tk_gemm.interleave_gate_and_up(wrong)
