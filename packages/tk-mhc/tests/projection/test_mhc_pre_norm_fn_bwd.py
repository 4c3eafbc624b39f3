"""mhc_pre_norm_fn_bwd."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
import tk_mhc
from tk_core.arch import ARCHS
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.trees import distinct_bytes
from tk_mhc import reference
from tk_mhc.projection.mhc_pre_norm_fn_bwd import MhcPreNormFnBwdConfig

from ..compare import assert_relative_error
from ..inputs import HIDDEN_SIZES, STREAM_SHAPES, TOKEN_COUNTS, bench_cases
from .test_mhc_pre_norm_fn import BENCH_SIZES, MODEL_SCALE, rows_of_fn

RESIDUAL_ERROR = 5e-3
"""‖d_residual - exact‖ / ‖exact‖ that the contract allows; rounding to bfloat16 takes about 1.7e-3 of it."""
WEIGHT_ERROR = 1e-3
"""The same for d_fn and d_norm_weight."""


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    head: bool = False,
    has_comb: bool = True,
    norm_weight: bool = True,
    given: bool = False,
    scale: float = MODEL_SCALE,
    first_element: int = 0,
) -> Make:
    """Normal values. mixes are large, so that both terms of d_residual matter: in a model the second is about 1 %.

    `head`: fn has m rows, not m(m + 2); without comb 2m. `given`: with a d_residual to be added to, of about the
    gradient's magnitude. Tensors start at element `first_element` of their storage.
    """
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        width = mhc_mult * hidden
        num_rows = rows_of_fn(mhc_mult, head, has_comb)

        tensor = partial(empty, device=device, first_element=first_element)
        streams = (*leading, mhc_mult, hidden)
        return {
            "d_mixes": tensor(*leading, num_rows).normal_(),
            "residual": tensor(*streams, dtype=torch.bfloat16).normal_(),
            "mhc_fn": tensor(num_rows, width).normal_(std=scale),
            "mhc_norm_weight": tensor(width).uniform_(0.5, 1.5) if norm_weight else None,
            "mixes": tensor(*leading, num_rows).normal_(std=scale * width),
            "rstd": tensor(*leading).uniform_(0.5, 1.5),
            "d_residual": tensor(*streams, dtype=torch.bfloat16).normal_(std=5 * scale) if given else None,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Relative errors to the float32 reference within the contract's bounds; a given d_residual is the one returned."""
    (gradients, written), (expected_gradients, _) = actual, expected
    bounds = {"d_residual": RESIDUAL_ERROR, "d_fn": WEIGHT_ERROR, "d_norm_weight": WEIGHT_ERROR}
    for (name, bound), x, y in zip(bounds.items(), gradients, expected_gradients, strict=True):
        if y is None:
            assert x is None, f"{name}: expected None, got a tensor"
            continue
        assert_same_metadata(x, y, name)
        assert_relative_error(x, y, bound, name)
    if written is not None:
        assert_equal(gradients[0], written, name="d_residual")


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and a given d_residual twice: it is read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["d_residual"])


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_norm_fn_bwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("d_residual",),
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17-given", make(17, 2, 64, given=True), small=True, modes=True),
        Case("m2-h64-t3-head", make(3, 2, 64, head=True), small=True, compile=True),
        Case("m4-h64-t17-no-comb-given", make(17, 4, 64, has_comb=False, given=True), small=True, compile=True),
        Case("m8-h64-t3-no-comb-no-weight", make(3, 8, 64, has_comb=False, norm_weight=False), small=True),
        *(Case(f"m4-h7168-t{t}-no-comb", make(t, has_comb=False)) for t in (64, 4096)),
        Case("m4-h192-t17-no-weight-given", make(17, 4, 192, norm_weight=False, given=True), small=True, compile=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True),
        Case("m8-h64-t17-head-given", make(17, 8, 64, head=True, given=True), small=True),
        Case("m2-h576-t1", make(1, 2, 576), small=True),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        # One token more than a tile; one less than two tiles; more tiles than ranges,
        # an odd number of them, so that the last range has fewer, and a partial last tile.
        Case("m2-h64-t65", make(65, 2, 64), small=True),
        Case("m2-h64-t127-no-weight", make(127, 2, 64, norm_weight=False), small=True),
        Case("m2-h64-t2200-given", make(2200, 2, 64, given=True)),
        Case("m4-h64-no-leading-given", make((), 4, 64, given=True), small=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-t0-given", make(0, 4, 64, given=True), small=True),
        Case("m8-h64-t2x0-no-weight", make((2, 0), 8, 64, norm_weight=False), small=True),
        Case("m4-h64-t3-unaligned-given", make(3, 4, 64, given=True, first_element=1), small=True),
        *(Case(f"m4-h7168-t{num_tokens}", make(num_tokens)) for num_tokens in TOKEN_COUNTS),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}-given", make(num_tokens, 4, hidden, given=True))
            for hidden in HIDDEN_SIZES
            for num_tokens in (17, 1001)
        ),
        *(Case(f"m{m}-h{hidden}-t{t}", make(t, m, hidden)) for m, hidden, t in STREAM_SHAPES),
        Case("m8-h7168-t1001-given", make(1001, 8, given=True), compile=True),
        Case("m4-h7168-t1001-no-weight", make(1001, norm_weight=False)),
        Case("m4-h7168-t8192-head", make(8192, head=True)),
        Case("m4-h7168-t8192-scale1", make(8192, scale=1.0)),
        bench_case("m4-h7168-t8192-given", make(8192, given=True), model_shape=True, compile=True),
        *bench_cases(make, (1, 64, 4001, 8001), BENCH_SIZES[1], (2, 8), compiled_tokens=()),
        bench_case("m4-h7168-t8192-head", make(8192, head=True)),
    ),
)


test_tiers = tiers.tests(SPEC)

TENSORS = ("d_mixes", "residual", "mhc_fn", "mhc_norm_weight", "mixes", "rstd", "d_residual")


def forward(residual: Tensor, fn: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """What is differentiated: mixes and rstd, by the formula."""
    x = residual.flatten(-2).to(fn.dtype)
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return (x @ (fn if norm_weight is None else fn * norm_weight).mT) * rstd.unsqueeze(-1), rstd


def exact(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the float64 reference; nothing is rounded to bfloat16, and a given d_residual stays as it is."""
    return reference.mhc_pre_norm_fn_bwd(
        **{name: None if inputs[name] is None else inputs[name].double() for name in TENSORS}
    )


def assert_accurate(inputs: dict[str, Any]) -> None:
    """Call the op, and compare with float64."""
    expected = exact(inputs)
    d_residual, d_fn, d_norm_weight = tk_mhc.mhc_pre_norm_fn_bwd(**inputs)
    assert_relative_error(d_residual, expected[0], RESIDUAL_ERROR, "d_residual")
    assert_relative_error(d_fn, expected[1], WEIGHT_ERROR, "d_fn")
    if expected[2] is None:
        assert d_norm_weight is None
    else:
        assert d_norm_weight is not None
        assert_relative_error(d_norm_weight, expected[2], WEIGHT_ERROR, "d_norm_weight")


def test_by_hand(device: str) -> None:
    # Two tokens of 2 · 64 channels, all 1 and all 2. Row 0 of fn is 1 in all channels, row 1 is 4 in channel 5, the
    # others are 0; the weight is 2.
    residual = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device)[:, None, None].repeat(1, 2, 64)
    fn = torch.zeros(8, 128, device=device)
    fn[0], fn[1, 5] = 1.0, 4.0
    d_mixes, mixes = (torch.zeros(2, 8, device=device) for _ in range(2))
    d_mixes[0, 0], d_mixes[1, 1] = 3.0, 1.0
    mixes[0, 0], mixes[1, 1] = 128.0, 256.0
    rstd = torch.tensor([1.0, 0.5], device=device)
    inputs = {"residual": residual, "mhc_fn": fn, "mixes": mixes, "rstd": rstd, "d_mixes": d_mixes}
    d_residual, d_fn, d_weight = tk_mhc.mhc_pre_norm_fn_bwd(
        **inputs, mhc_norm_weight=torch.full((128,), 2.0, device=device)
    )
    # Token 0: 1 · 3 · 1 · 2 - 1 · 1 / 128 · 3 · 128 = 3. Token 1: - 2 · 0.25 / 128 · 256 = -1, and in channel 5 with
    # 0.5 · 1 · 4 · 2 added.
    assert d_residual.flatten(1)[:, 4:7].tolist() == [[3.0, 3.0, 3.0], [-1.0, 3.0, -1.0]]
    # d_F: row 0 is 1 · 3 · 1, row 1 is 0.5 · 1 · 2, in every channel.
    assert d_fn[:, 0].tolist() == [6.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert d_weight is not None
    assert d_weight[4:7].tolist() == [3.0, 7.0, 3.0]
    # Without a weight F is half of what it was.
    d_residual, d_fn, d_weight = tk_mhc.mhc_pre_norm_fn_bwd(**inputs, mhc_norm_weight=None)
    assert d_residual.flatten(1)[:, 4:7].tolist() == [[0.0, 0.0, 0.0], [-1.0, 1.0, -1.0]]
    assert d_fn[:2, 7].tolist() == [3.0, 1.0]
    assert d_weight is None


@pytest.mark.parametrize("norm_weight", [False, True])
def test_forward_formula_is_the_references(norm_weight: bool) -> None:
    residual, fn = torch.randn(3, 2, 3, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    weight = torch.rand(6, dtype=torch.float64) if norm_weight else None
    expected = reference.mhc_pre_norm_fn(residual, fn, weight, 0.1, return_rstd=True)
    torch.testing.assert_close(forward(residual, fn, weight, 0.1), expected)


@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize("norm_weight", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)])
def test_reference_against_autograd(dtype: torch.dtype, tolerance: float, norm_weight: bool, num_rows: int) -> None:
    residual = torch.randn(5, 7, 2, 64, dtype=dtype, requires_grad=True)
    fn = torch.randn(num_rows, 128, dtype=dtype, requires_grad=True)
    weight = (torch.rand(128, dtype=dtype) + 0.5).requires_grad_() if norm_weight else None
    mixes, rstd = forward(residual, fn, weight, 0.1)
    d_mixes = torch.randn_like(mixes)
    wanted = [x for x in (residual, fn, weight) if x is not None]
    expected = torch.autograd.grad(mixes, wanted, d_mixes)
    with torch.no_grad():
        gradients = reference.mhc_pre_norm_fn_bwd(d_mixes, residual, fn, weight, mixes, rstd)
    for actual, want in zip([x for x in gradients if x is not None], expected, strict=True):
        torch.testing.assert_close(actual, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("mhc_mult", "head"), [(2, False), (4, False), (4, True), (8, False)])
def test_against_autograd_at_the_scale_of_a_model(mhc_mult: int, head: bool, device: str) -> None:
    inputs = make(200, mhc_mult, 192, head=head)(device)
    leaves = [inputs[name].double().requires_grad_() for name in ("residual", "mhc_fn", "mhc_norm_weight")]
    mixes, rstd = forward(*leaves, 1e-6)
    expected = torch.autograd.grad(mixes, leaves, inputs["d_mixes"].double())
    inputs.update(mixes=mixes.detach().float(), rstd=rstd.detach().float())
    gradients = tk_mhc.mhc_pre_norm_fn_bwd(**inputs)
    # The default tolerances for bfloat16.
    torch.testing.assert_close(gradients[0], expected[0].bfloat16())
    for actual, want in zip(gradients[1:], expected[1:], strict=True):
        assert actual is not None
        assert_relative_error(actual, want, WEIGHT_ERROR)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_each_term_counts(mhc_mult: int, head: bool, device: str) -> None:
    inputs = make(70, mhc_mult, 64, head=head, given=True)(device)
    before = inputs["d_residual"].clone()
    assert_accurate({**inputs, "d_residual": before.clone()})
    # What is added to stands alone.
    nothing = {**inputs, "d_mixes": torch.zeros_like(inputs["d_mixes"]), "d_residual": before.clone()}
    d_residual, d_fn, d_norm_weight = tk_mhc.mhc_pre_norm_fn_bwd(**nothing)
    assert_equal(d_residual, before)
    assert not d_fn.any()
    assert d_norm_weight is not None
    assert not d_norm_weight.any()


def test_given_d_residual_is_written_and_returned(device: str) -> None:
    inputs = make(17, 4, 64, given=True)(device)
    given = inputs["d_residual"]
    before = given.clone()
    d_residual, _, _ = tk_mhc.mhc_pre_norm_fn_bwd(**inputs)
    assert d_residual is given
    assert not torch.equal(given, before)
    # Added in float32 and rounded once: hardly an element is off by a unit in the last place of bfloat16.
    expected = exact({**inputs, "d_residual": before})[0].bfloat16()
    assert (given != expected).float().mean() < 0.01
    new, _, _ = tk_mhc.mhc_pre_norm_fn_bwd(**{**inputs, "d_residual": None})
    assert_relative_error(new.double() + before.double(), given.double(), 2 * RESIDUAL_ERROR)


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64)("cpu"),
    [
        ({"d_mixes": torch.ones(3, 4)}, ValueError, "d_mixes: .*shape"),
        ({"d_mixes": torch.ones(2, 24)}, ValueError, "d_mixes: .*shape"),
        ({"residual": torch.ones(3, 3, 64).bfloat16()}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"mhc_fn": torch.ones(12, 256)}, ValueError, "mhc_fn"),
        ({"mixes": torch.ones(3, 8)}, ValueError, "mixes: .*shape"),
        ({"rstd": torch.ones(3, 1)}, ValueError, "rstd: .*shape"),
        ({"d_residual": torch.ones(3, 256).bfloat16()}, ValueError, "d_residual: .*shape"),
        ({"d_residual": torch.ones(2, 4, 64).bfloat16()}, ValueError, "d_residual: .*shape"),
    ],
)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
@pytest.mark.parametrize("has_d_residual", [False, True])
def test_config_fits(has_d_residual: bool, arch: tk_core.arch.Arch) -> None:
    for mhc_mult in (2, 4, 8):
        for num_rows in (mhc_mult, 2 * mhc_mult, mhc_mult * (mhc_mult + 2)):
            for hidden in (64, 576, 7168, 8192):
                width = mhc_mult * hidden
                config = MhcPreNormFnBwdConfig.best(width, num_rows, has_d_residual, arch)
                assert width % config.block_channels == 0
                assert 1 <= config.num_ranges <= 32
                assert (config.num_stages > 0) == arch.has_tma
                most_bytes = arch.shared_memory_each(config.blocks_per_sm) - 1024
                assert config.shared_bytes(num_rows, has_d_residual) <= most_bytes


@pytest.mark.gpu(gib=11)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"),
    [(2, 64, 8192), (2, 576, 100), (4, 7168, 1), (4, 7168, 65), (4, 7168, 8192), (8, 8192, 512)],
)
@pytest.mark.parametrize("given", [False, True])
def test_gpu_is_accurate(given: bool, mhc_mult: int, hidden: int, num_tokens: int, scale: float) -> None:
    assert_accurate(make(num_tokens, mhc_mult, hidden, scale=scale, given=given)("cuda"))


@pytest.mark.gpu
def test_gpu_writes_no_token_beyond_the_last() -> None:
    inputs = make(128, 4, 576, given=True)("cuda")
    whole = inputs["d_residual"]
    after = whole[70:].clone()
    few = {name: inputs[name][:70] for name in ("d_mixes", "residual", "mixes", "rstd", "d_residual")}
    tk_mhc.mhc_pre_norm_fn_bwd(**{**inputs, **few})
    assert_equal(whole[70:].clone(), after)


@pytest.mark.gpu(gib=11)
def test_gpu_sums_over_more_than_two_to_the_31_elements() -> None:
    inputs = make(80_000)("cuda")
    d_residual, d_fn, _ = tk_mhc.mhc_pre_norm_fn_bwd(**inputs)
    last = {**inputs, **{name: inputs[name][-100:].clone() for name in ("d_mixes", "residual", "mixes", "rstd")}}
    assert_equal(d_residual[-100:].clone(), tk_mhc.mhc_pre_norm_fn_bwd(**last)[0])
    # All tokens at once in float64 would take 18 GB more.
    g = inputs["rstd"][:, None].double() * inputs["d_mixes"].double()
    d_f = sum(
        g_part.mT @ x_part.flatten(1).double()
        for g_part, x_part in zip(g.split(8000), inputs["residual"].split(8000), strict=True)
    )
    assert_relative_error(d_fn, d_f * inputs["mhc_norm_weight"].double(), WEIGHT_ERROR, "d_fn")
