"""engram_gate_bwd."""

import math
from itertools import product
from typing import Any

import pytest
import torch

import tk_engram
from tk_core.arch import ARCHS
from tk_core.testing import Case, Make, OpSpec, assert_equal, empty, tiers
from tk_core.testing.numeric import calc_diff
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.gate.engram_gate_bwd import EngramGateBwdConfig
from tk_engram.sizes import num_token_ranges

from ..compare import assert_calc_diff, assert_close_bfloat16
from .test_engram_gate_fwd import CLAMP_VALUE, EPS, Layout, shared_cases
from .test_engram_gate_fwd import make as make_forward


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    layout: Layout = "dense",
    zeros: bool = False,
    mask: bool = False,
    given: bool = False,
    first_element: int = 0,
    clamp_value: float = CLAMP_VALUE,
    **options: bool,
) -> Make:
    """Arguments as for the forward, with the tensors that it saves.

    `given`: with a grad_kv, which starts at element `first_element` of its storage.
    """

    def build(device: str) -> dict[str, Any]:
        inputs = make_forward(
            num_tokens, mhc_mult, hidden, layout=layout, zeros=zeros, mask=mask, first_element=first_element, **options
        )(device)
        inputs["clamp_value"] = clamp_value
        _, *saved = reference.engram_gate_fwd(**inputs)
        del inputs["eps"]
        inputs["grad_out"] = torch.randn((num_tokens, mhc_mult, hidden), dtype=torch.bfloat16, device=device)
        inputs |= zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved)
        kv = empty(num_tokens, mhc_mult + 1, hidden, dtype=torch.bfloat16, device=device, first_element=first_element)
        return {**inputs, "grad_kv": kv.normal_() if given else None}

    return build


def compare(actual: Any, expected: Any) -> None:
    """bfloat16 gradients by `assert_close_bfloat16`, those written to grad_kv too; parts within 1e-8."""
    (result, written), (expected_result, expected_written) = actual, expected
    for name, got, want in zip(("grad_x", "grad_k", "grad_v"), result, expected_result):
        assert_close_bfloat16(got, want, 1e-8, name)
    assert_calc_diff(result[3], expected_result[3], 1e-8, "grad_w_partial")
    assert (written is None) == (expected_written is None)
    if expected_written is not None:
        assert_close_bfloat16(written, expected_written, 1e-8, "grad_kv")


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every input and every output once; grad_kv is the same memory as two of these."""
    return distinct_bytes({name: x for name, x in inputs.items() if name != "grad_kv"}) + distinct_bytes(outputs)


SPEC = OpSpec(
    op=tk_engram.engram_gate_bwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("grad_kv",),
    cases=(
        *shared_cases(make, given=True),
        Case("m2-h64-t5-zeros-clamp0", make(5, 2, 64, zeros=True, clamp_value=0.0), small=True),
        Case("m4-h64-t5-mask-alone", make(5, 4, 64, mask=True, add_residual=False), small=True),
        Case("m2-h64-t5-clamp", make(5, 2, 64, clamp_value=0.5), small=True),
        Case("m1-h64-t533", make(533, 1, 64)),
        *(Case(f"m4-h{hidden}-t1001", make(1001, 4, hidden)) for hidden in (576, 1280, 2560, 5120, 8192)),
        Case("m8-h7168-t1001-strided-mask", make(1001, 8, 7168, layout="strided", mask=True), compile=True),
        Case("m5-h8192-t401-given", make(401, 5, 8192, given=True, add_residual=False)),
        Case("m1-h16384-t401", make(401, 1, 16384)),
        Case("m4-h7168-t1001-mask", make(1001, 4, 7168, layout="packed", mask=True, given=True), compile=True),
        Case("m4-h4096-t401-alone", make(401, 4, 4096, given=True, add_residual=False), compile=True),
    ),
)


test_tiers = tiers.tests(SPEC)

INPUTS = ("hidden_states", "k", "v", "weight_fused")
PER_TOKEN = ("grad_out", "hidden_states", "k", "v", "dot", "gate_score", "rstd_x", "rstd_k")


def test_by_hand(device: str) -> None:
    """All of a stream's channels equal, eps 0: rstd = 1 / |x|, d = ±8 · weight, and x and k only have their signs."""
    x = torch.full((1, 1, 64), 2.0, device=device).bfloat16()
    k = torch.full((1, 1, 64), -4.0, device=device).bfloat16()
    v = torch.full((1, 64), 0.5, device=device).bfloat16()
    grad_out = torch.full((1, 1, 64), 3.0, device=device).bfloat16()
    weight = torch.full((1, 64), 0.5, device=device)
    _, *saved = tk_engram.engram_gate_fwd(x, k, v, weight, 0.0, 1e-6)
    grad_x, grad_k, grad_v, grad_w = tk_engram.engram_gate_bwd(grad_out, x, k, v, weight, *saved, 1e-6)
    gate = 1 / (1 + math.exp(2.0))
    assert grad_v[0, 7].item() == torch.tensor(3 * gate).bfloat16().item()
    # d does not change with the size of x, nor of k.
    assert abs(grad_x[0, 0, 7].item() - 3) < 1e-6
    assert abs(grad_k[0, 0, 7].item()) < 1e-6
    # d = -8 · weight where all 64 change together: -1/8 for each channel; the root has 1 / (2 · 2).
    expected = 64 * 3 * 0.5 * gate * (1 - gate) * (1 / 4) * (-1 / 8)
    torch.testing.assert_close(grad_w.sum(0)[0, 7].item(), expected, rtol=1e-5, atol=0)
    assert (grad_w[1:] == 0).all()


def gradients(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Those that autograd finds through the forward's reference, in this dtype; that by the weight is a sum."""
    leaves = [inputs[name].to(dtype).detach().requires_grad_() for name in INPUTS]
    options = {name: inputs[name] for name in ("image_token_mask", "add_residual") if name in inputs}
    out, *_ = reference.engram_gate_fwd(*leaves, EPS, inputs["clamp_value"], **options)
    return torch.autograd.grad(out, leaves, inputs["grad_out"].to(dtype))


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs, with what the forward saves in float64."""
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in inputs.items()
    }
    options = {name: inputs[name] for name in ("image_token_mask", "add_residual") if name in inputs}
    _, *saved = reference.engram_gate_fwd(*(wide[name] for name in INPUTS), EPS, inputs["clamp_value"], **options)
    return wide | dict(zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved))


@pytest.mark.parametrize("mhc_mult", [1, 3, 4])
@pytest.mark.parametrize("options", [{}, {"add_residual": False}, {"mask": True}, {"clamp_value": 0.5}])
def test_reference_against_autograd(options: dict[str, Any], mhc_mult: int) -> None:
    inputs = in_float64(make(6, mhc_mult, 64, **options)("cpu"))
    grad_x, grad_k, grad_v, grad_w = reference.engram_gate_bwd(**inputs)
    expected = gradients(inputs, torch.float64)
    torch.testing.assert_close((grad_x, grad_k, grad_v, grad_w.sum(0)), expected, rtol=1e-10, atol=1e-12)


def test_parts_are_sums_over_every_so_many_tokens(device: str) -> None:
    num_ranges = num_token_ranges(1, 64)
    inputs = make(2 * num_ranges + 3, 1, 64)(device)
    *_, grad_w = tk_engram.engram_gate_bwd(**inputs)
    assert grad_w.shape == (num_ranges, 1, 64)
    part = {
        name: x[1::num_ranges] if isinstance(x, torch.Tensor) and name != "weight_fused" else x
        for name, x in inputs.items()
    }
    expected = gradients(part, torch.float64)[3]
    assert part["grad_out"].shape[0] == 3
    assert calc_diff(grad_w[1], expected) < 1e-8


@pytest.mark.parametrize("clamp_value", [0.0, 1e-6])
def test_nothing_comes_through_the_gate_of_padding(clamp_value: float, device: str) -> None:
    inputs = make(5, 2, 128, zeros=True, clamp_value=clamp_value)(device)
    results = tk_engram.engram_gate_bwd(**inputs)
    assert all(each.isfinite().all() for each in results)
    grad_x, grad_k, grad_v, grad_w = results
    assert torch.equal(grad_x[::2], inputs["grad_out"][::2])
    assert (grad_k[::2] == 0).all()
    assert_equal(grad_v[::2].clone(), (0.5 * inputs["grad_out"][::2].float()).sum(1).bfloat16())
    assert (grad_w[:5:2] == 0).all()
    assert (grad_w[1] != 0).any()


def test_nothing_comes_through_the_root_of_what_is_clamped(device: str) -> None:
    inputs = make(5, 2, 128, clamp_value=1e6)(device)
    grad_x, grad_k, _, grad_w = tk_engram.engram_gate_bwd(**inputs)
    assert torch.equal(grad_x, inputs["grad_out"])
    assert (grad_k == 0).all()
    assert (grad_w == 0).all()


@pytest.mark.parametrize("add_residual", [True, False])
def test_masked_tokens(add_residual: bool, device: str) -> None:
    inputs = make(7, 2, 192, mask=True, add_residual=add_residual)(device)
    masked = inputs["image_token_mask"]
    # What lies there does not matter.
    inputs["k"][masked] = math.nan
    inputs["v"][masked] = math.inf
    grad_x, grad_k, grad_v, grad_w = tk_engram.engram_gate_bwd(**inputs)
    kept = inputs["grad_out"][masked]
    assert torch.equal(grad_x[masked], kept if add_residual else torch.zeros_like(kept))
    assert (grad_k[masked] == 0).all()
    assert (grad_v[masked] == 0).all()
    # As many ranges as there are tokens, and more: one token each.
    assert (grad_w[:7][masked] == 0).all()
    assert (grad_w[:7][~masked] != 0).any()
    assert grad_w.isfinite().all()


@pytest.mark.parametrize("layout", ["packed", "strided", "unaligned"])
def test_layouts_and_grad_kv_change_nothing(layout: str, device: str) -> None:
    inputs = make(5, 3, 320, layout=layout, given=True)(device)
    grad_kv = inputs["grad_kv"]
    result = tk_engram.engram_gate_bwd(**inputs)
    assert result[1].data_ptr() == grad_kv.data_ptr()
    assert result[1].shape == (5, 3, 320)
    assert result[2].data_ptr() == grad_kv[:, 3].data_ptr()
    dense = {**inputs, "k": inputs["k"].contiguous(), "v": inputs["v"].contiguous(), "grad_kv": None}
    expected = tk_engram.engram_gate_bwd(**dense)
    assert expected[1].is_contiguous()
    assert expected[2].is_contiguous()
    assert_equal(tuple(each.clone(memory_format=torch.contiguous_format) for each in result), expected)
    assert_equal(grad_kv, torch.cat((expected[1], expected[2].unsqueeze(1)), dim=1))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_config_fits(has_mask: bool, arch: str) -> None:
    for mhc_mult, hidden in product(range(1, 9), range(64, 16385, 64)):
        config = EngramGateBwdConfig.best(mhc_mult, hidden, has_mask, ARCHS[arch])
        if config is None:
            continue
        assert config.threads % 32 == 0
        assert 32 <= config.threads <= 1024
        assert config.num_stages >= 2
        room = ARCHS[arch].max_shared_memory
        assert config.min_blocks * config.shared_bytes(mhc_mult, hidden) <= room, hidden
        rounds = config.padded(hidden) // (8 * config.threads)
        assert config.padded(hidden) - hidden < 256 * rounds, hidden


GOOD = make(3, 2, 64, mask=True, given=True)("cpu")
X = GOOD["hidden_states"]


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"hidden_states": X.repeat(1, 5, 1)}, ValueError, "hc_mult .*hidden_states.*1 to 8"),
        ({"hidden_states": X[..., :32].contiguous()}, ValueError, "hidden .*hidden_states.*64 to 16384"),
        ({"hidden_states": X.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "hidden .*multiple of 64"),
        *(
            ({name: GOOD[name][:2]}, ValueError, f"{name}: .*shape")
            for name in ("image_token_mask", *PER_TOKEN)
            if name != "hidden_states"
        ),
        ({"weight_fused": GOOD["weight_fused"][:1]}, ValueError, "weight_fused: .*shape"),
        ({"grad_kv": X}, ValueError, "grad_kv: .*shape"),
        ({"clamp_value": -1e-6}, ValueError, "clamp_value: .*at least 0"),
        ({"clamp_value": math.inf}, ValueError, "clamp_value: .*finite"),
    ],
)


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize(("mhc_mult", "hidden"), [(4, 7168), (3, 576), (8, 7168)])
def test_gpu_bits_do_not_depend_on_other_tokens(mhc_mult: int, hidden: int) -> None:
    inputs = make(2001, mhc_mult, hidden, layout="packed")("cuda")
    whole = tk_engram.engram_gate_bwd(**inputs)
    for first, last in ((0, 1), (777, 778), (1, 140)):
        part = {name: inputs[name][first:last] for name in PER_TOKEN}
        expected = tuple(each[first:last].clone() for each in whole[:3])
        assert_equal(tk_engram.engram_gate_bwd(**{**inputs, **part})[:3], expected)


@pytest.mark.gpu(gib=23)
@pytest.mark.parametrize("mhc_mult", [4, 8])
def test_gpu_beyond_two_to_the_31_elements(mhc_mult: int) -> None:
    num_tokens = 2**31 // (mhc_mult * 8192) + 5
    last = make(9, mhc_mult, 8192)("cuda")
    inputs = dict(last)
    for name in PER_TOKEN:
        inputs[name] = last[name].new_zeros((num_tokens, *last[name].shape[1:]))
        inputs[name][-9:] = last[name]
    results = tk_engram.engram_gate_bwd(**inputs)
    expected = reference.engram_gate_bwd(**last)
    for name, got, want in zip(("grad_x", "grad_k", "grad_v"), results, expected):
        assert_close_bfloat16(got[-9:].clone(), want, 1e-8, name)
    assert calc_diff(results[3].sum(0), expected[3].sum(0)) < 1e-8
