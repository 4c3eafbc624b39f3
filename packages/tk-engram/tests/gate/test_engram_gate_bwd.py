"""engram_gate_bwd."""

import math
from itertools import product
from typing import Any

import pytest
import torch

import tk_engram
from tk_core.arch import ARCHS
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import calc_diff
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.gate.engram_gate_bwd import EngramGateBwdConfig
from tk_engram.sizes import num_token_ranges

from .compare import assert_calc_diff, assert_close_bfloat16
from .test_engram_gate_fwd import CLAMP_VALUE, EPS, Layout
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
        grad_kv = None
        if given:
            size = num_tokens * (mhc_mult + 1) * hidden
            grad_kv = torch.empty(first_element + size, dtype=torch.bfloat16, device=device)[first_element:]
            grad_kv = grad_kv.view(num_tokens, mhc_mult + 1, hidden).normal_()
        return {**inputs, "grad_kv": grad_kv}

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
        # One warp and several, one round of channels and several, the last one full or partial; any number of streams.
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m1-h576-t2", make(2, 1, 576), small=True),
        Case("m8-h128-t1", make(1, 8, 128), small=True),
        Case("m2-h1088-t1", make(1, 2, 1088), small=True),
        Case("m3-h320-t5-packed-mask", make(5, 3, 320, layout="packed", mask=True, given=True), small=True, modes=True),
        Case("m2-h64-t5-strided-zeros", make(5, 2, 64, layout="strided", zeros=True), small=True),
        Case("m2-h64-t5-zeros-clamp0", make(5, 2, 64, zeros=True, clamp_value=0.0), small=True),
        Case("m2-h64-t5-unaligned", make(5, 2, 64, layout="unaligned", first_element=1, given=True), small=True),
        Case("m4-h64-t5-mask-alone", make(5, 4, 64, mask=True, add_residual=False), small=True),
        Case("m2-h64-t5-clamp", make(5, 2, 64, clamp_value=0.5), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        Case("m1-h64-t533", make(533, 1, 64)),
        *(Case(f"m4-h7168-t{tokens}", make(tokens, 4, 7168)) for tokens in (0, 1, 17, 4001, 8001)),
        *(Case(f"m4-h{hidden}-t1001", make(1001, 4, hidden)) for hidden in (576, 1280, 2560, 5120, 8192)),
        *(Case(f"m{m}-h4096-t1001", make(1001, m, 4096, layout="packed", given=True)) for m in (1, 2, 8)),
        Case("m8-h7168-t1001-strided-mask", make(1001, 8, 7168, layout="strided", mask=True), compile=True),
        Case("m5-h8192-t401-given", make(401, 5, 8192, given=True, add_residual=False)),
        Case("m1-h16384-t401", make(401, 1, 16384)),
        Case("m4-h7168-t1001-mask", make(1001, 4, 7168, layout="packed", mask=True, given=True), compile=True),
        Case("m4-h4096-t401-alone", make(401, 4, 4096, given=True, add_residual=False), compile=True),
        Case("m4-h7168-t8192-bench", make(8192, 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"m4-h7168-t{tokens}-bench", make(tokens, 4, 7168), bench=True, gpu=False)
            for tokens in (1, 64, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560)
        ),
        Case("m4-h4096-t8192-bench", make(8192, 4, 4096), bench=True, gpu=False),
        Case("m4-h2048-t4001-bench", make(4001, 4, 2048), bench=True, gpu=False),
        Case(
            "m4-h7168-t8192-packed-bench",
            make(8192, 4, 7168, layout="packed", given=True),
            bench=True,
            gpu=False,
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INPUTS = ("hidden_states", "k", "v", "weight_fused")


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [False, True])
def test_op_against_autograd_in_float64(mask: bool, device: str) -> None:
    inputs = make(33, 4, 576, mask=mask)(device)
    grad_x, grad_k, grad_v, grad_w = tk_engram.engram_gate_bwd(**inputs)
    expected = gradients(inputs, torch.float64)
    for name, got, want in zip(("grad_x", "grad_k", "grad_v"), (grad_x, grad_k, grad_v), expected):
        assert_close_bfloat16(got, want.bfloat16(), 1e-8, name)
    assert calc_diff(grad_w.sum(0), expected[3]) < 1e-8


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_comes_through_the_root_of_what_is_clamped(device: str) -> None:
    inputs = make(5, 2, 128, clamp_value=1e6)(device)
    grad_x, grad_k, _, grad_w = tk_engram.engram_gate_bwd(**inputs)
    assert torch.equal(grad_x, inputs["grad_out"])
    assert (grad_k == 0).all()
    assert (grad_w == 0).all()


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
def test_zero_tokens(device: str) -> None:
    grad_x, grad_k, grad_v, grad_w = tk_engram.engram_gate_bwd(**make(0, 4, 128)(device))
    assert grad_x.shape == grad_k.shape == (0, 4, 128)
    assert grad_v.shape == (0, 128)
    assert grad_w.shape == (num_token_ranges(4, 128), 4, 128)
    assert (grad_w == 0).all()


def test_least_bytes_counts_grad_kv_once() -> None:
    for given in (False, True):
        inputs = make(2, 2, 64, given=given)("cpu")
        outputs = tk_engram.engram_gate_bwd(**inputs)
        streams, saved, weight = 2 * (2 * 2 * 64), 4 * (2 * 2), 4 * (2 * 64)
        expected = 5 * streams + 2 * 2 * (2 * 64) + 4 * saved + weight * (1 + num_token_ranges(2, 64))
        assert least_bytes(inputs, outputs) == expected


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


@pytest.mark.parametrize(("mhc_mult", "hidden"), [(1, 64), (4, 576), (4, 2048), (4, 7168), (4, 8192), (8, 4096)])
@pytest.mark.parametrize("has_mask", [False, True])
def test_shapes_that_are_read_once_on_an_h200(has_mask: bool, mhc_mult: int, hidden: int) -> None:
    assert EngramGateBwdConfig.best(mhc_mult, hidden, has_mask, ARCHS["sm_90a"]) is not None


GOOD = make(3, 2, 64, mask=True, given=True)("cpu")
X, K, V, WEIGHT, MASK = (GOOD[name] for name in (*INPUTS, "image_token_mask"))
DOT = GOOD["dot"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grad_out": None}, TypeError, "grad_out: .*Tensor"),
        ({"grad_out": X.float()}, TypeError, "grad_out: .*bfloat16"),
        ({"grad_out": X[:2]}, ValueError, "grad_out: .*shape"),
        ({"grad_out": X.repeat(1, 1, 2)[..., :64]}, ValueError, "grad_out: .*contiguous"),
        ({"grad_out": X.to("meta")}, ValueError, "grad_out: .*device"),
        ({"hidden_states": 1}, TypeError, "hidden_states: .*Tensor"),
        ({"hidden_states": X.float()}, TypeError, "hidden_states: .*bfloat16"),
        ({"hidden_states": X[0]}, ValueError, "hidden_states: .*shape"),
        ({"hidden_states": X.repeat(1, 1, 2)[..., :64]}, ValueError, "hidden_states: .*contiguous"),
        ({"hidden_states": X.repeat(1, 5, 1)}, ValueError, "hc_mult .*hidden_states.*1 to 8"),
        ({"hidden_states": X[..., :32].contiguous()}, ValueError, "hidden .*hidden_states.*64 to 16384"),
        ({"hidden_states": X.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "hidden .*multiple of 64"),
        ({"k": None}, TypeError, "k: .*Tensor"),
        ({"k": K.float()}, TypeError, "k: .*bfloat16"),
        ({"k": K[:2]}, ValueError, "k: .*shape"),
        ({"k": K.repeat(1, 1, 2)[..., ::2]}, ValueError, "k: .*stride 1"),
        ({"k": K.to("meta")}, ValueError, "k: .*device"),
        ({"v": 0.5}, TypeError, "v: .*Tensor"),
        ({"v": V.half()}, TypeError, "v: .*bfloat16"),
        ({"v": V[:2]}, ValueError, "v: .*shape"),
        ({"v": V.repeat(1, 2)[:, ::2]}, ValueError, "v: .*stride 1"),
        ({"v": V.to("meta")}, ValueError, "v: .*device"),
        ({"weight_fused": None}, TypeError, "weight_fused: .*Tensor"),
        ({"weight_fused": WEIGHT.bfloat16()}, TypeError, "weight_fused: .*float32"),
        ({"weight_fused": WEIGHT[:1]}, ValueError, "weight_fused: .*shape"),
        ({"weight_fused": torch.ones(64, 2).T}, ValueError, "weight_fused: .*contiguous"),
        ({"weight_fused": WEIGHT.to("meta")}, ValueError, "weight_fused: .*device"),
        *(
            case
            for name in ("dot", "gate_score", "rstd_x", "rstd_k")
            for case in (
                ({name: None}, TypeError, f"{name}: .*Tensor"),
                ({name: DOT.bfloat16()}, TypeError, f"{name}: .*float32"),
                ({name: DOT[:, :1]}, ValueError, f"{name}: .*shape"),
                ({name: torch.ones(2, 3).T}, ValueError, f"{name}: .*contiguous"),
                ({name: DOT.to("meta")}, ValueError, f"{name}: .*device"),
            )
        ),
        ({"clamp_value": None}, TypeError, "clamp_value: .*number"),
        ({"clamp_value": -1e-6}, ValueError, "clamp_value: .*at least 0"),
        ({"clamp_value": math.inf}, ValueError, "clamp_value: .*finite"),
        ({"image_token_mask": 1}, TypeError, "image_token_mask: .*Tensor"),
        ({"image_token_mask": MASK.int()}, TypeError, "image_token_mask: .*bool"),
        ({"image_token_mask": MASK[:2]}, ValueError, "image_token_mask: .*shape"),
        ({"image_token_mask": MASK.repeat(2)[::2]}, ValueError, "image_token_mask: .*contiguous"),
        ({"image_token_mask": MASK.to("meta")}, ValueError, "image_token_mask: .*device"),
        ({"add_residual": None}, TypeError, "add_residual: .*bool"),
        ({"grad_kv": 1}, TypeError, "grad_kv: .*Tensor"),
        ({"grad_kv": GOOD["grad_kv"].float()}, TypeError, "grad_kv: .*bfloat16"),
        ({"grad_kv": X}, ValueError, "grad_kv: .*shape"),
        ({"grad_kv": GOOD["grad_kv"].repeat(1, 1, 2)[..., :64]}, ValueError, "grad_kv: .*contiguous"),
        ({"grad_kv": GOOD["grad_kv"].to("meta")}, ValueError, "grad_kv: .*device"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    before = GOOD["grad_kv"].clone()
    with pytest.raises(error, match=match):
        tk_engram.engram_gate_bwd(**{**GOOD, **change})
    assert_equal(GOOD["grad_kv"], before)


def test_new_options_are_given_by_name() -> None:
    saved = (DOT, DOT, DOT, DOT)
    with pytest.raises(TypeError, match="positional"):
        tk_engram.engram_gate_bwd(X, X, K, V, WEIGHT, *saved, 1e-6, MASK)


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize(("mhc_mult", "hidden"), [(4, 7168), (3, 576), (8, 7168)])
def test_gpu_bits_do_not_depend_on_other_tokens(mhc_mult: int, hidden: int) -> None:
    inputs = make(2001, mhc_mult, hidden, layout="packed")("cuda")
    whole = tk_engram.engram_gate_bwd(**inputs)
    per_token = ("grad_out", "hidden_states", "k", "v", "dot", "gate_score", "rstd_x", "rstd_k")
    for first, last in ((0, 1), (777, 778), (1, 140)):
        part = {name: inputs[name][first:last] for name in per_token}
        expected = tuple(each[first:last].clone() for each in whole[:3])
        assert_equal(tk_engram.engram_gate_bwd(**{**inputs, **part})[:3], expected)


@pytest.mark.gpu(gib=23)
@pytest.mark.parametrize("mhc_mult", [4, 8])
def test_gpu_beyond_two_to_the_31_elements(mhc_mult: int) -> None:
    num_tokens = 2**31 // (mhc_mult * 8192) + 5
    last = make(9, mhc_mult, 8192)("cuda")
    per_token = ("grad_out", "hidden_states", "k", "v", "dot", "gate_score", "rstd_x", "rstd_k")
    inputs = dict(last)
    for name in per_token:
        inputs[name] = last[name].new_zeros((num_tokens, *last[name].shape[1:]))
        inputs[name][-9:] = last[name]
    results = tk_engram.engram_gate_bwd(**inputs)
    expected = reference.engram_gate_bwd(**last)
    for name, got, want in zip(("grad_x", "grad_k", "grad_v"), results, expected):
        assert_close_bfloat16(got[-9:].clone(), want, 1e-8, name)
    assert calc_diff(results[3].sum(0), expected[3].sum(0)) < 1e-8
