"""engram_gate_fwd."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import tk_engram
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_core.testing.numeric import calc_diff
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.gate.engram_gate_fwd import EngramGateFwdConfig

from ..compare import assert_calc_diff, assert_close_bfloat16

Layout = Literal["dense", "packed", "strided", "unaligned"]
EPS, CLAMP_VALUE = 1e-5, 1e-6


def draw_kv(num_tokens: int, mhc_mult: int, hidden: int, layout: Layout, device: str) -> tuple[Tensor, Tensor]:
    """Normal k (T, m, H) and v (T, H).

    packed: views of one (T, m + 1, H). strided: gaps between streams and tokens, rows at multiples of 16 bytes.
    unaligned: slices of a projection whose rows are not aligned.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    if layout == "packed":
        kv = normal(num_tokens, mhc_mult + 1, hidden)
        return kv[:, :mhc_mult], kv[:, mhc_mult]
    if layout == "strided":
        return normal(num_tokens, mhc_mult, 2 * hidden)[..., hidden:], normal(num_tokens, 3 * hidden)[:, :hidden]
    if layout == "unaligned":
        projection = normal(num_tokens, (mhc_mult + 1) * hidden + 3)
        k, v = projection[:, 1 : 1 + mhc_mult * hidden], projection[:, 1 + mhc_mult * hidden : -2]
        return k.unflatten(-1, (mhc_mult, hidden)), v
    return normal(num_tokens, mhc_mult, hidden), normal(num_tokens, hidden)


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    layout: Layout = "dense",
    zeros: bool = False,
    mask: bool = False,
    first_element: int = 0,
    **options: bool,
) -> Make:
    """Normal values.

    `zeros`: every other token's k is 0, as rows of padding are. `mask`: every third token is an image's. The streams
    begin at element `first_element` of their storage. `options` are the op's.
    """

    def build(device: str) -> dict[str, Any]:
        x = empty(num_tokens, mhc_mult, hidden, dtype=torch.bfloat16, device=device, first_element=first_element)
        k, v = draw_kv(num_tokens, mhc_mult, hidden, layout, device)
        if zeros:
            k[::2] = 0
        image_token_mask = (torch.arange(num_tokens, device=device) % 3 == 1) if mask else None
        return {
            "hidden_states": x.normal_(),
            "k": k,
            "v": v,
            "weight_fused": torch.randn((mhc_mult, hidden), device=device),
            "eps": EPS,
            "clamp_value": CLAMP_VALUE,
            **({"image_token_mask": image_token_mask} if mask else {}),
            **options,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """out by `assert_close_bfloat16`, also where it was written in place; saved tensors within 2e-10."""
    (result, written), (expected_result, expected_written) = actual, expected
    assert_close_bfloat16(result[0], expected_result[0], 2e-10, "out")
    assert_close_bfloat16(written, expected_written, 2e-10, "hidden_states")
    names = ("dot", "gate_score", "rstd_x", "rstd_k")
    for name, got, want in zip(names, result[1:], expected_result[1:], strict=True):
        assert (got is None) == (want is None), f"{name}: expected {want}, got {got}"
        if want is not None:
            assert_calc_diff(got, want, 2e-10, name)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and streams that are overwritten twice."""
    return distinct_bytes((inputs, outputs)) + (distinct_bytes(outputs[0]) if inputs.get("inplace") else 0)


def shared_cases(make: Callable[..., Make], **views: bool) -> list[Case]:
    """Cases of the op and of its backward; `views` are options for k and v that are views of one tensor."""
    return [
        # One warp and several, one round of channels and several, the last one full or partial; any number of streams.
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m1-h576-t2", make(2, 1, 576), small=True),
        Case("m8-h128-t1", make(1, 8, 128), small=True),
        Case("m2-h1088-t1", make(1, 2, 1088), small=True),
        Case("m3-h320-t5-packed-mask", make(5, 3, 320, layout="packed", mask=True, **views), small=True, modes=True),
        Case("m2-h64-t5-strided-zeros", make(5, 2, 64, layout="strided", zeros=True), small=True),
        Case("m2-h64-t5-unaligned", make(5, 2, 64, layout="unaligned", first_element=1, **views), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        *(Case(f"m4-h7168-t{tokens}", make(tokens, 4, 7168)) for tokens in (0, 1, 17, 4001, 8001)),
        *(Case(f"m{m}-h4096-t1001", make(1001, m, 4096, layout="packed", **views)) for m in (1, 2, 8)),
        bench_case("m4-h7168-t8192", make(8192, 4, 7168), model_shape=True, compile=True),
        *(bench_case(f"m4-h7168-t{tokens}", make(tokens, 4, 7168)) for tokens in (1, 64, 4001, 8001)),
        *(bench_case(f"m4-h{hidden}-t8192", make(8192, 4, hidden)) for hidden in (576, 2048, 2560, 4096)),
        bench_case("m4-h2048-t4001", make(4001, 4, 2048)),
        bench_case("m4-h7168-t8192-packed", make(8192, 4, 7168, layout="packed", **views)),
    ]


IN_PLACE = {"inplace": True, "save_for_backward": False}

SPEC = OpSpec(
    op=tk_engram.engram_gate_fwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("hidden_states",),
    cases=(
        *shared_cases(make),
        Case("m4-h64-t7-inplace", make(7, 4, 64, **IN_PLACE), small=True, modes=True),
        Case("m2-h64-t3-inplace-unaligned", make(3, 2, 64, first_element=3, **IN_PLACE), small=True),
        Case("m2-h192-t4-inplace-mask", make(4, 2, 192, mask=True, **IN_PLACE), small=True),
        Case("m4-h64-t3-not-saved", make(3, 4, 64, save_for_backward=False), small=True),
        Case("m4-h64-t4-mask-alone", make(4, 4, 64, mask=True, add_residual=False), small=True),
        *(Case(f"m4-h{hidden}-t65", make(65, 4, hidden)) for hidden in (576, 1280, 2560, 5120, 16384)),
        Case("m8-h8192-t1001-strided-mask", make(1001, 8, 8192, layout="strided", mask=True)),
        Case("m4-h2048-t4001-not-saved", make(4001, 4, 2048, save_for_backward=False)),
        Case(
            "m4-h7168-t1001-mask-alone-not-saved",
            make(1001, 4, 7168, mask=True, add_residual=False, save_for_backward=False),
            compile=True,
        ),
        Case("m3-h576-t17-inplace", make(17, 3, 576, layout="unaligned", **IN_PLACE)),
        bench_case("m4-h7168-t8192-inplace", make(8192, 4, 7168, **IN_PLACE)),
    ),
)


test_tiers = tiers.tests(SPEC)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


@pytest.mark.parametrize("sign", [1, -1])
def test_by_hand(sign: int, device: str) -> None:
    x = torch.tensor([[3.0] * 64, [0.0] * 64], device=device).bfloat16()[None]
    k = torch.tensor([[sign * 2.0] * 64, [5.0] * 64], device=device).bfloat16()[None]
    v = torch.full((1, 64), 8.0, device=device).bfloat16()
    weight = torch.full((2, 64), 0.5, device=device)
    out, dot, gate, rstd_x, rstd_k = tk_engram.engram_gate_fwd(x, k, v, weight, 0.25, 1e-6)
    assert dot.tolist() == [[sign * 192.0, 0.0]]
    torch.testing.assert_close(rstd_x, torch.tensor([[9.25**-0.5, 2.0]], device=device))
    torch.testing.assert_close(rstd_k, torch.tensor([[4.25**-0.5, 25.25**-0.5]], device=device))
    d = 192 / math.sqrt(9.25 * 4.25 * 64)
    torch.testing.assert_close(gate, torch.tensor([[sigmoid(sign * math.sqrt(d)), 0.5]], device=device))
    expected = torch.tensor([3 + 8 * sigmoid(sign * math.sqrt(d)), 4.0], device=device).bfloat16()
    assert_equal(out[0, :, 5].clone(), expected)


@pytest.mark.parametrize("clamp_value", [0.0, 1.0, 4.0])
def test_zero_opens_the_gate_halfway_and_small_ones_are_clamped(clamp_value: float, device: str) -> None:
    x = torch.ones(3, 1, 64, device=device).bfloat16()
    k = torch.tensor([0.0, 2.0, -2.0], device=device).bfloat16()[:, None, None].repeat(1, 1, 64)
    v = torch.ones(3, 64, device=device).bfloat16()
    weight = torch.full((1, 64), 0.25, device=device)
    _, _, gate, *_ = tk_engram.engram_gate_fwd(x, k, v, weight, 0.0 if clamp_value else 1e-30, clamp_value)
    # k = 0 with eps 0 has an infinite rstd.
    gate = gate[1:] if clamp_value else gate
    d = 0.25 * 8
    root = math.sqrt(max(d, clamp_value))
    expected = [sigmoid(root), sigmoid(-root)] if clamp_value else [0.5, sigmoid(root), sigmoid(-root)]
    torch.testing.assert_close(gate[:, 0], torch.tensor(expected, device=device))


def plain_formula(inputs: dict[str, Any]) -> torch.Tensor:
    """The gate in float64, token by token and stream by stream."""
    x, k, weight = (inputs[name].double().cpu() for name in ("hidden_states", "k", "weight_fused"))
    gates = torch.empty(x.shape[:2], dtype=torch.float64)
    for t in range(x.shape[0]):
        for s in range(x.shape[1]):
            norms = math.sqrt(float((x[t, s] @ x[t, s]) / x.shape[2]) + EPS)
            norms *= math.sqrt(float((k[t, s] @ k[t, s]) / x.shape[2]) + EPS)
            d = float((x[t, s] * weight[s]) @ k[t, s]) / norms / math.sqrt(x.shape[2])
            gates[t, s] = sigmoid(math.copysign(math.sqrt(max(abs(d), CLAMP_VALUE)), d))
    return gates


def test_against_a_plain_formula(device: str) -> None:
    inputs = make(9, 3, 576, layout="packed")(device)
    out, _, gate, *_ = tk_engram.engram_gate_fwd(**inputs)
    expected = plain_formula(inputs)
    assert calc_diff(gate.cpu(), expected) < 2e-10
    x, v = inputs["hidden_states"].double().cpu(), inputs["v"].double().cpu()
    assert_close_bfloat16(out.cpu(), (x + expected[..., None] * v[:, None]).bfloat16(), 2e-10, "out")


def test_out_does_not_depend_on_what_is_saved(device: str) -> None:
    inputs = make(17, 4, 576)(device)
    saving = tk_engram.engram_gate_fwd(**inputs)
    out, *saved = tk_engram.engram_gate_fwd(**inputs, save_for_backward=False)
    assert_equal(out, saving[0])
    assert saved == [None] * 4
    in_place, *_ = tk_engram.engram_gate_fwd(**inputs, **IN_PLACE)
    assert in_place is inputs["hidden_states"]
    assert_equal(in_place, saving[0])


@pytest.mark.parametrize("add_residual", [True, False])
def test_masked_tokens(add_residual: bool, device: str) -> None:
    inputs = make(7, 2, 192, mask=True)(device)
    masked = inputs["image_token_mask"]
    # What lies there does not matter.
    inputs["k"][masked] = math.nan
    inputs["v"][masked] = math.inf
    inputs["hidden_states"][masked.nonzero()[0], 0, 3] = -0.0
    out, *saved = tk_engram.engram_gate_fwd(**inputs, add_residual=add_residual)
    kept = inputs["hidden_states"][masked]
    assert torch.equal(out[masked], kept if add_residual else torch.zeros_like(kept))
    for each in saved:
        assert (each[masked] == 0).all()
        assert (each[~masked] != 0).all()
    del inputs["image_token_mask"]
    others = {name: x[~masked] if name in ("hidden_states", "k", "v") else x for name, x in inputs.items()}
    expected = tk_engram.engram_gate_fwd(**others, add_residual=add_residual)
    assert_equal((out[~masked], *(each[~masked] for each in saved)), expected)


def test_config_covers_hidden() -> None:
    for hidden in range(64, 16385, 64):
        config = EngramGateFwdConfig.best(hidden)
        assert config.threads % 32 == 0, hidden
        assert 32 <= config.threads <= 1024, hidden
        rounds = -(-hidden // (8 * config.threads))
        assert rounds <= 7, hidden
        assert 8 * config.threads * rounds - hidden < max(256, hidden // 4), hidden
        assert 1 <= config.min_blocks <= 32, hidden


GOOD = make(3, 2, 64, mask=True)("cpu")
X = GOOD["hidden_states"]


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"hidden_states": X.repeat(1, 5, 1)}, ValueError, "hc_mult .*hidden_states.*1 to 8"),
        ({"hidden_states": X[:, :0]}, ValueError, "hc_mult .*hidden_states.*1 to 8"),
        ({"hidden_states": X.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "hidden .*multiple of 64"),
        ({"hidden_states": X.repeat(1, 1, 257)}, ValueError, "hidden .*hidden_states.*64 to 16384"),
        ({"k": GOOD["k"][:2]}, ValueError, "k: .*shape"),
        ({"weight_fused": GOOD["weight_fused"][:1]}, ValueError, "weight_fused: .*shape"),
        ({"eps": -1e-5}, ValueError, "eps: .*at least 0"),
        ({"eps": math.inf}, ValueError, "eps: .*finite"),
        ({"clamp_value": -1.0}, ValueError, "clamp_value: .*at least 0"),
        ({"clamp_value": math.nan}, ValueError, "clamp_value: .*finite"),
        ({"image_token_mask": GOOD["image_token_mask"][:2]}, ValueError, "image_token_mask: .*shape"),
        ({"inplace": True}, ValueError, "inplace: .*save_for_backward"),
    ],
)


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize(("mhc_mult", "hidden"), [(4, 7168), (3, 576)])
def test_gpu_bits_of_a_token_do_not_depend_on_the_others(mhc_mult: int, hidden: int) -> None:
    inputs = make(8001, mhc_mult, hidden, layout="packed")("cuda")
    whole = tk_engram.engram_gate_fwd(**inputs)
    for first, last in ((0, 1), (4001, 4002), (7998, 8001), (1, 64)):
        part = {name: inputs[name][first:last] for name in ("hidden_states", "k", "v")}
        expected = tuple(each[first:last].clone() for each in whole)
        assert_equal(tk_engram.engram_gate_fwd(**{**inputs, **part}), expected)


@pytest.mark.gpu(gib=14)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_tokens = 2**31 // (8 * 8192) + 5
    inputs = make(num_tokens, 8, 8192)("cuda")
    last = {name: inputs[name][-9:].clone() for name in ("hidden_states", "k", "v")}
    out, *saved = tk_engram.engram_gate_fwd(**inputs)
    expected, *expected_saved = reference.engram_gate_fwd(**{**inputs, **last})
    assert_close_bfloat16(out[-9:].clone(), expected, 2e-10, "out")
    torch.testing.assert_close([each[-9:].clone() for each in saved], expected_saved, rtol=1e-4, atol=1e-3)
