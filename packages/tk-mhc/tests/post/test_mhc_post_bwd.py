"""mhc_post_bwd."""

from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import assert_equal, tiers
from tk_mhc import reference
from tk_mhc.testing.post.mhc_post_bwd import SPEC, make

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


def test_by_hand() -> None:
    residual = torch.tensor([1.0, 10.0]).bfloat16()[:, None].repeat(1, 64)
    x = torch.full((64,), 3.0).bfloat16()
    post = torch.tensor([[1.0], [0.5]])
    comb = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    d_o = torch.tensor([2.0, 8.0]).bfloat16()[:, None].repeat(1, 64)
    d_x, d_residual, d_post, d_comb = tk_mhc.mhc_post_bwd(x, residual, post, comb, d_o)
    assert d_x[7].item() == 1 * 2 + 0.5 * 8
    assert d_residual[:, 7].tolist() == [1 * 2 + 2 * 8, 3 * 2 + 4 * 8]
    assert d_post.tolist() == [[64 * 3 * 2], [64 * 3 * 8]]
    assert d_comb.tolist() == [[64 * 1 * 2, 64 * 1 * 8], [64 * 10 * 2, 64 * 10 * 8]]


def gradients(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Those that autograd finds through the forward's reference, in this dtype."""
    leaves = [x.to(dtype).requires_grad_() for name, x in inputs.items() if name != "d_o"]
    return torch.autograd.grad(reference.mhc_post(*leaves), leaves, inputs["d_o"].to(dtype))


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_reference_against_autograd(dtype: torch.dtype, tolerance: float, mhc_mult: int) -> None:
    inputs = make((2, 3), mhc_mult, 64)("cpu")
    actual = reference.mhc_post_bwd(**{name: x.to(dtype) for name, x in inputs.items()})
    torch.testing.assert_close(actual, gradients(inputs, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_against_autograd_in_float64(device: str) -> None:
    inputs = make((17,), 4, 576)(device)
    d_x, d_residual, d_post, d_comb = tk_mhc.mhc_post_bwd(**inputs)
    expected = gradients(inputs, torch.float64)
    torch.testing.assert_close((d_x, d_residual), tuple(x.bfloat16() for x in expected[:2]))
    torch.testing.assert_close((d_post, d_comb), tuple(x.float() for x in expected[2:]), rtol=1e-4, atol=1e-4)


def test_fuse_grad_acc_changes_nothing() -> None:
    inputs = make((3,), 4, 64)("cpu")
    assert_equal(tk_mhc.mhc_post_bwd(**inputs, fuse_grad_acc=False), tk_mhc.mhc_post_bwd(**inputs))


GOOD = make((5,), 4, 64)("cpu")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": None}, TypeError, "x: .*Tensor"),
        ({"x": GOOD["x"].float()}, TypeError, "x: .*bfloat16"),
        ({"x": GOOD["x"][:4]}, ValueError, "x: .*shape"),
        ({"x": GOOD["x"].repeat(1, 2)[:, ::2]}, ValueError, "x: .*contiguous"),
        ({"x": GOOD["x"].to("meta")}, ValueError, "x: .*device"),
        ({"residual": 1.0}, TypeError, "residual: .*Tensor"),
        ({"residual": GOOD["residual"].float()}, TypeError, "residual: .*bfloat16"),
        ({"residual": GOOD["residual"][0, 0]}, ValueError, "residual: .*shape"),
        ({"residual": GOOD["residual"][:, :3]}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"residual": GOOD["residual"][..., :32]}, ValueError, "hidden.*residual.*64 to 8192"),
        ({"residual": GOOD["residual"].repeat(1, 1, 2)[..., :96]}, ValueError, "hidden.*residual.*multiple of 64"),
        ({"post_layer_mix": GOOD["post_layer_mix"].bfloat16()}, TypeError, "post_layer_mix: .*float32"),
        ({"post_layer_mix": GOOD["post_layer_mix"][..., 0]}, ValueError, "post_layer_mix: .*shape"),
        ({"post_layer_mix": GOOD["post_layer_mix"].to("meta")}, ValueError, "post_layer_mix: .*device"),
        ({"comb_res_mix": GOOD["comb_res_mix"].double()}, TypeError, "comb_res_mix: .*float32"),
        ({"comb_res_mix": GOOD["comb_res_mix"][:, :3]}, ValueError, "comb_res_mix: .*shape"),
        ({"comb_res_mix": GOOD["comb_res_mix"].mT}, ValueError, "comb_res_mix: .*contiguous"),
        ({"comb_res_mix": GOOD["comb_res_mix"].to("meta")}, ValueError, "comb_res_mix: .*device"),
        ({"d_o": None}, TypeError, "d_o: .*Tensor"),
        ({"d_o": GOOD["d_o"].float()}, TypeError, "d_o: .*bfloat16"),
        ({"d_o": GOOD["d_o"][:4]}, ValueError, "d_o: .*shape"),
        ({"d_o": GOOD["d_o"].to("meta")}, ValueError, "d_o: .*device"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_mhc.mhc_post_bwd(**{**GOOD, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("mhc_mult", [4, 8])
def test_gpu_bits_do_not_depend_on_other_tokens_or_strides(mhc_mult: int) -> None:
    inputs = make((8192 // mhc_mult,), mhc_mult, 7168, strided=True)("cuda")
    expected = tk_mhc.mhc_post_bwd(**inputs)
    for token in (0, 1001):
        alone = {name: x[token : token + 1].contiguous() for name, x in inputs.items()}
        assert_equal(tk_mhc.mhc_post_bwd(**alone), tuple(x[token : token + 1].clone() for x in expected))
