"""mhc_post."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_mhc import reference

from ..inputs import HIDDEN_SIZES, TOKEN_COUNTS, bench_cases


def draw_streams(leading: tuple[int, ...], mhc_mult: int, hidden: int, device: str, strided: bool) -> torch.Tensor:
    """Normal values, bfloat16 (..., m, hidden); `strided`: every other channel of a tensor twice as wide."""
    width = 2 * hidden if strided else hidden
    streams = torch.randn((*leading, mhc_mult, width), dtype=torch.bfloat16, device=device)
    return streams[..., ::2] if strided else streams


def draw_mixes(leading: tuple[int, ...], mhc_mult: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """post (..., m, 1) in 0 … 2, as sigmoid times 2 gives it, and comb (..., m, m) whose rows add up to 1."""
    post = 2 * torch.rand((*leading, mhc_mult, 1), device=device)
    comb = torch.randn((*leading, mhc_mult, mhc_mult), device=device).softmax(-1)
    return post, comb


def make(
    leading: tuple[int, ...],
    mhc_mult: int,
    hidden: int,
    *,
    strided: bool = False,
    has_out: bool = False,
    has_comb: bool = True,
) -> Make:
    """Normal values and mixes like those of a model."""

    def build(device: str) -> dict[str, Any]:
        post, comb = draw_mixes(leading, mhc_mult, device)
        out = torch.empty((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device) if has_out else None
        return {
            "x": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "residual": draw_streams(leading, mhc_mult, hidden, device, strided),
            "post_layer_mix": post,
            "comb_res_mix": comb if has_comb else None,
            "out": out,
        }

    return build


def shared_cases(make: Callable[..., Make]) -> list[Case]:
    """Cases of the op and of its backward."""
    return [
        Case("m4-h64-t3", make((3,), 4, 64), small=True, modes=True),
        Case("m2-h192-t17", make((17,), 2, 192), small=True),
        Case("m8-h128-t3", make((3,), 8, 128), small=True),
        Case("m4-h576-t3", make((3,), 4, 576), small=True, compile=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t0", make((0,), 4, 64), small=True),
        Case("m4-h64-t2x3-strided", make((2, 3), 4, 64, strided=True), small=True, modes=True),
        *(Case(f"m4-h{hidden}-t64", make((64,), 4, hidden)) for hidden in HIDDEN_SIZES),
        *(Case(f"m4-h7168-t{tokens}", make((tokens,), 4, 7168)) for tokens in TOKEN_COUNTS if tokens != 64),
        Case("m4-h2560-t4001-strided", make((4001,), 4, 2560, strided=True)),
        Case("m4-h576-t3-no-comb", make((3,), 4, 576, has_comb=False), small=True, modes=True, compile=True),
        Case("m2-h192-t17-no-comb", make((17,), 2, 192, has_comb=False), small=True),
        Case("m8-h128-t2x3-no-comb", make((2, 3), 8, 128, strided=True, has_comb=False), small=True),
        Case("m4-h64-t0-no-comb", make((0,), 4, 64, has_comb=False), small=True),
        *(Case(f"m{m}-h7168-t1001-no-comb", make((1001,), m, 7168, has_comb=False)) for m in (2, 4, 8)),
        bench_case("m4-h7168-t8192-no-comb", make((8192,), 4, 7168, has_comb=False)),
        *bench_cases(make, (1, 64, 4001)),
    ]


SPEC = OpSpec(
    op=tk_mhc.mhc_post,
    mutates=("out",),
    cases=(
        # Full and partial tiles; all numbers of streams.
        *shared_cases(make),
        Case("m4-h64-t1-out", make((1,), 4, 64, has_out=True), small=True, modes=True),
        *(Case(f"m{mhc_mult}-h7168-t17", make((17,), mhc_mult, 7168), compile=True) for mhc_mult in (2, 8)),
    ),
)


test_tiers = tiers.tests(SPEC)


def draw(*args: Any, device: str = "cpu", **kwargs: Any) -> dict[str, torch.Tensor]:
    """The tensors of a case."""
    return {name: x for name, x in make(*args, **kwargs)(device).items() if x is not None}


def test_by_hand() -> None:
    # Streams of 1 and 10, a sublayer's output of 100: comb's rows are where a stream goes, its columns what comes in.
    residual = torch.tensor([1.0, 10.0]).bfloat16()[:, None].repeat(1, 64)
    x = torch.full((64,), 100.0).bfloat16()
    post = torch.tensor([[1.0], [0.5]])
    comb = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = tk_mhc.mhc_post(x, residual, post, comb)
    assert out[:, 5].tolist() == [100 + 1 * 1 + 3 * 10, 50 + 2 * 1 + 4 * 10]


def test_streams_that_are_passed_on_unchanged() -> None:
    inputs = draw((3,), 4, 64)
    inputs["post_layer_mix"].zero_()
    inputs["comb_res_mix"].copy_(torch.eye(4))
    assert_equal(tk_mhc.mhc_post(**inputs), inputs["residual"])


def draw_with_extremes(mhc_mult: int, device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a case with zeros of either sign, infinities and NaN, and the identity as comb."""
    inputs = make((33,), mhc_mult, 576)(device)
    for name in ("x", "residual"):
        values = inputs[name].view(-1)
        for i, extreme in enumerate((0.0, -0.0, float("inf"), float("nan"))):
            values[i :: 11 + i] = extreme
    identity = torch.eye(mhc_mult, device=device).repeat(33, 1, 1)
    return {name: x for name, x in inputs.items() if name != "comb_res_mix" and x is not None}, identity


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_without_comb_it_has_the_bits_of_the_identity(mhc_mult: int, device: str) -> None:
    inputs, identity = draw_with_extremes(mhc_mult, device)
    expected = tk_mhc.mhc_post(**inputs, comb_res_mix=identity)
    assert_equal(tk_mhc.mhc_post(**inputs, comb_res_mix=None), expected)
    # Streams do not mix: each has its own values.
    plain = inputs["post_layer_mix"] * inputs["x"][:, None].float() + inputs["residual"].float()
    finite = expected.isfinite()
    assert finite.any()
    torch.testing.assert_close(expected[finite], plain.bfloat16()[finite])


def test_each_step_is_a_fused_multiply_add() -> None:
    # The product has bits down to 2⁻²⁹. Its float32 rounding is taken off it: were it rounded first, 0 would remain.
    near_one = 1 + 2.0**-7
    residual = torch.tensor([near_one, 0.0]).bfloat16()[:, None].repeat(1, 64)
    comb = torch.tensor([[near_one + 2.0**-22, 0.0], [0.0, 0.0]])
    exact = near_one * (near_one + 2.0**-22)
    post = torch.tensor([[-torch.tensor(exact).item()], [0.0]])
    out = tk_mhc.mhc_post(torch.ones(64).bfloat16(), residual, post, comb)
    assert exact + post[0].item() != 0
    assert out[0, 0].item() == torch.tensor(exact + post[0].item()).bfloat16().item()


def test_sums_are_rounded_once() -> None:
    # The product 2⁻²⁴ + 2⁻⁵⁴, added to 1, is just more than half of float32's step 2⁻²³, but exactly half after a first
    # rounding to float64's 53 bits.
    residual = torch.tensor([130 * 2.0**-7, 1.0]).bfloat16()[:, None].repeat(1, 64)
    comb = torch.tensor([[16519105 * 2.0**-48, 0.0], [-1.0, 0.0]])
    out = tk_mhc.mhc_post(torch.ones(64).bfloat16(), residual, torch.tensor([[1.0], [0.0]]), comb)
    assert out[0, 0].item() == 2.0**-23


def test_against_einsum_in_float64() -> None:
    inputs = {name: x.double() for name, x in draw((5,), 4, 64).items()}
    added = inputs["post_layer_mix"] * inputs["x"][:, None]
    expected = added + torch.einsum("tkn,tki->tni", inputs["comb_res_mix"], inputs["residual"])
    torch.testing.assert_close(reference.mhc_post(**inputs), expected, rtol=1e-14, atol=1e-14)
    rounded = {name: x.float() if "mix" in name else x.bfloat16() for name, x in inputs.items()}
    torch.testing.assert_close(tk_mhc.mhc_post(**rounded), expected.bfloat16())


def test_out_is_written_and_returned() -> None:
    inputs = draw((2, 3), 4, 64)
    expected = tk_mhc.mhc_post(**inputs)
    out = torch.empty_like(expected)
    for function in (tk_mhc.mhc_post, reference.mhc_post):
        out.fill_(float("nan"))
        assert function(**inputs, out=out) is out
        assert_equal(out, expected)


GOOD = draw((5,), 4, 64)


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"x": GOOD["x"][:4]}, ValueError, "x: .*shape"),
        ({"residual": GOOD["residual"][0, 0]}, ValueError, "residual: .*shape"),
        ({"residual": GOOD["residual"][:, :3]}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"residual": GOOD["residual"][..., :32]}, ValueError, "hidden.*residual.*64 to 8192"),
        ({"residual": GOOD["residual"].repeat(1, 1, 2)[..., :96]}, ValueError, "hidden.*residual.*multiple of 64"),
        ({"post_layer_mix": GOOD["post_layer_mix"][..., 0]}, ValueError, "post_layer_mix: .*shape"),
        ({"comb_res_mix": GOOD["comb_res_mix"][:, :3]}, ValueError, "comb_res_mix: .*shape"),
        ({"out": torch.empty(5, 64).bfloat16()}, ValueError, "out: .*shape"),
    ],
)
