"""mhc_pre_norm_fn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference

from ..compare import assert_relative_error, relative_error
from ..inputs import HIDDEN_SIZES, STREAM_SHAPES, TOKEN_COUNTS, bench_cases

RELATIVE_ERROR = 5e-4
"""‖mixes - exact‖ / ‖exact‖ that the contract allows."""
MODEL_SCALE = 1e-4
"""Standard deviation of fn in a model."""
BENCH_SIZES = (1, 128, 1024, 4001, 8001), (576, 2048, 2560, 3072, 4096, 6144)
"""Tokens and channels of benchmarks."""


def rows_of_fn(mhc_mult: int, head: bool, has_comb: bool) -> int:
    """Rows for the head, or for a sublayer with or without comb."""
    return mhc_mult if head else mhc_mult * (mhc_mult + 2 if has_comb else 2)


def draw_fn(num_rows: int, num_channels: int, scale: float, device: str) -> Tensor:
    """fn of normal values."""
    return scale * torch.randn((num_rows, num_channels), device=device)


def draw_norm_weight(num_channels: int, device: str) -> Tensor:
    """A weight from 0.5 to 1.5."""
    return 0.5 + torch.rand((num_channels,), device=device)


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    head: bool = False,
    has_comb: bool = True,
    norm_weight: bool = True,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    n_splits: int | None = None,
    return_rstd: bool = False,
) -> Make:
    """Normal residual and fn. The default eps is so large that leaving it out would give ten times the allowed error.

    `head`: fn has m rows, not m(m + 2); without comb 2m.
    """
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        return {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            "mhc_fn": draw_fn(rows_of_fn(mhc_mult, head, has_comb), num_channels, scale, device),
            "mhc_norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
            "mhc_norm_eps": eps,
            "n_splits": n_splits,
            "return_rstd": return_rstd,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Mixes within `RELATIVE_ERROR` of the reference's, which is in float32; rstd within 1e-5.

    One wrong element of 8192 tokens is a relative error of about 2e-3.
    """
    assert isinstance(actual, tuple) == isinstance(expected, tuple)
    mixes, rstd = expected if isinstance(expected, tuple) else (expected, None)
    actual_mixes, actual_rstd = actual if isinstance(actual, tuple) else (actual, None)
    assert_same_metadata(actual_mixes, mixes, "mixes")
    assert_relative_error(actual_mixes, mixes, RELATIVE_ERROR, "mixes")
    if rstd is not None:
        assert_same_metadata(actual_rstd, rstd, "rstd")
        torch.testing.assert_close(actual_rstd, rstd, rtol=1e-5, atol=0)


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_norm_fn,
    compare=compare,
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m4-h192-t17-rstd", make(17, 4, 192, return_rstd=True), small=True, modes=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True),
        Case("m8-h64-t3-no-weight-rstd", make(3, 8, 64, norm_weight=False, return_rstd=True), small=True, compile=True),
        Case("m2-h576-t3-no-weight", make(3, 2, 576, norm_weight=False), small=True),
        Case("m4-h128-t17-head", make(17, 4, 128, head=True, return_rstd=True), small=True, compile=True),
        Case("m2-h64-t3-head", make(3, 2, 64, head=True), small=True),
        Case("m8-h64-t3-head-no-weight", make(3, 8, 64, head=True, norm_weight=False), small=True),
        Case("m4-h128-t17-no-comb", make(17, 4, 128, has_comb=False, return_rstd=True), small=True, compile=True),
        Case("m2-h64-t3-no-comb", make(3, 2, 64, has_comb=False), small=True),
        Case("m8-h64-t3-no-comb-no-weight", make(3, 8, 64, has_comb=False, norm_weight=False), small=True),
        *(Case(f"m4-h7168-t{t}-no-comb", make(t, has_comb=False)) for t in (64, 1001, 8192)),
        Case("m8-h8192-t300-no-comb", make(300, 8, 8192, has_comb=False)),
        # One split, splits of two lengths, one per block of channels, more than blocks.
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 7, 12, 10_000)
        ),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        Case("m4-h64-no-leading-rstd", make((), 4, 64, return_rstd=True), small=True),
        Case("m4-h64-t2x3-rstd", make((2, 3), 4, 64, return_rstd=True), small=True),
        Case("m4-h64-t2x0-rstd", make((2, 0), 4, 64, return_rstd=True), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}-rstd", make(num_tokens, 4, hidden, return_rstd=True))
            for hidden in HIDDEN_SIZES
            for num_tokens in ((17, 4096) if hidden != 7168 else TOKEN_COUNTS)
        ),
        *(Case(f"m{m}-h{hidden}-t{t}", make(t, m, hidden)) for m, hidden, t in STREAM_SHAPES),
        Case("m4-h7168-t1000-no-weight", make(1000, norm_weight=False)),
        Case("m4-h7168-t64-head", make(64, head=True)),
        Case("m4-h7168-t8192-head", make(8192, head=True)),
        *(Case(f"m4-h7168-t129-splits{n_splits}", make(129, n_splits=n_splits)) for n_splits in (1, 2, 7, 16, 448)),
        *(Case(f"m4-h7168-t{num_tokens}-scale1", make(num_tokens, scale=1.0)) for num_tokens in (64, 8192)),
        *bench_cases(
            make, *BENCH_SIZES, mhc_mults=(2, 8), model_tokens=(64, 8192), compiled_tokens=(64, 8192), eps=1e-6
        ),
        bench_case("m4-h7168-t8192-scale1", make(8192, scale=1.0, eps=1e-6)),
        bench_case("m4-h7168-t64-head", make(64, head=True, eps=1e-6)),
    ),
)


test_tiers = tiers.tests(SPEC)


def exact(inputs: dict[str, Any]) -> Tensor:
    """Mixes of the float64 reference."""
    weight = inputs["mhc_norm_weight"]
    mixes = reference.mhc_pre_norm_fn(
        inputs["residual"],
        inputs["mhc_fn"].double(),
        None if weight is None else weight.double(),
        inputs["mhc_norm_eps"],
    )
    assert isinstance(mixes, Tensor)
    return mixes


def test_by_hand(device: str) -> None:
    # Two streams of 64 channels, all 2 or all 4: means of squares 4 and 16, so rstd 1/2 and 1/4, and x · rstd is 1.
    residual = torch.tensor([2.0, 4.0], dtype=torch.bfloat16, device=device)[:, None, None].repeat(1, 2, 64)
    fn = torch.zeros(8, 128, device=device)
    for row in range(8):
        fn[row, 16 * row] = row + 1.0
    mixes, rstd = tk_mhc.mhc_pre_norm_fn(residual, fn, None, 0.0, return_rstd=True)
    torch.testing.assert_close(rstd, torch.tensor([0.5, 0.25], device=device))
    row = torch.arange(1.0, 9.0, device=device)
    torch.testing.assert_close(mixes, row.repeat(2, 1))
    # The weight of a channel: 3 in stream 0, 5 in stream 1.
    weight = torch.tensor([3.0, 5.0], device=device).repeat_interleave(64)
    mixes = tk_mhc.mhc_pre_norm_fn(residual, fn, weight, 0.0)
    torch.testing.assert_close(mixes, (row * torch.tensor([3.0, 5.0], device=device).repeat_interleave(4)).repeat(2, 1))
    # With an eps of 12 the first token's rstd is rsqrt(4 + 12) = 1/4: half of what it was.
    mixes, rstd = tk_mhc.mhc_pre_norm_fn(residual[0], fn, None, 12.0, return_rstd=True)
    torch.testing.assert_close(rstd, torch.tensor(0.25, device=device))
    torch.testing.assert_close(mixes, row / 2)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_against_rms_norm_and_linear_of_pytorch(mhc_mult: int, head: bool, device: str) -> None:
    inputs = make(33, mhc_mult, 192, head=head)(device)
    x = inputs["residual"].flatten(1).double()
    normed = F.rms_norm(x, (mhc_mult * 192,), inputs["mhc_norm_weight"].double(), inputs["mhc_norm_eps"])
    mixes = tk_mhc.mhc_pre_norm_fn(**inputs)
    assert mixes.shape == (33, mhc_mult if head else mhc_mult * (mhc_mult + 2))
    assert_relative_error(mixes, F.linear(normed, inputs["mhc_fn"].double()), RELATIVE_ERROR)


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64)("cpu"),
    [
        ({"residual": torch.ones(64).bfloat16()}, ValueError, "residual: .*shape"),
        ({"residual": torch.ones(3, 3, 64).bfloat16()}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"residual": torch.ones(3, 4, 96).bfloat16()}, ValueError, "hidden.*residual.*multiple of 64"),
        ({"residual": torch.ones(3, 4, 0).bfloat16()}, ValueError, "hidden.*residual.*64 to 8192"),
        ({"residual": torch.ones(3, 4, 8256).bfloat16()}, ValueError, "hidden.*residual.*64 to 8192"),
        ({"mhc_fn": torch.ones(12, 256)}, ValueError, "rows of mhc_fn: expected 24, 8 without comb, or 4 for the head"),
        ({"mhc_norm_eps": -1.0}, ValueError, "mhc_norm_eps.*at least 0"),
    ],
)


@contextmanager
def tf32() -> Iterator[None]:
    """PyTorch's float32 matrix products in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"),
    [(2, 576, 1024), (4, 7168, 16), (4, 7168, 512), (4, 7168, 8192), (8, 8192, 512)],
)
def test_gpu_is_as_accurate_as_tf32(mhc_mult: int, hidden: int, num_tokens: int, scale: float) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, scale=scale)("cuda")
    expected = exact(inputs)
    mixes = tk_mhc.mhc_pre_norm_fn(**inputs)
    assert_relative_error(mixes, expected, RELATIVE_ERROR)
    if scale == 1e-4:
        torch.testing.assert_close(mixes.double(), expected, rtol=1e-3, atol=1e-3)
    # Of many tokens, so that cuBLAS takes tensor cores.
    many = {**inputs, "residual": torch.randn((4096, mhc_mult, hidden), dtype=torch.bfloat16, device="cuda")}
    with tf32():
        from_tf32 = reference.mhc_pre_norm_fn(**many)
    limit = relative_error(from_tf32, exact(many))
    assert limit > 1e-5, "expected a product in TF32 to compare with, got one in float32"
    error = relative_error(mixes, expected)
    assert error <= limit, f"expected a relative error of at most that of TF32, {limit:.3g}, got {error:.3g}"


@pytest.mark.gpu
@pytest.mark.parametrize("n_splits", [None, 1, 2, 7, 10_000])
@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_gpu_any_number_of_splits_is_accurate(num_tokens: int, n_splits: int | None) -> None:
    inputs = make(num_tokens, n_splits=n_splits, scale=1.0)("cuda")
    assert_relative_error(tk_mhc.mhc_pre_norm_fn(**inputs), exact(inputs), RELATIVE_ERROR)


@pytest.mark.gpu
@pytest.mark.parametrize("n_splits", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"), [(2, 192, 17), (4, 576, 300), (4, 7168, 1), (4, 7168, 65), (8, 1280, 64)]
)
def test_gpu_splits_are_added_in_order(mhc_mult: int, hidden: int, num_tokens: int, n_splits: int) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, n_splits=n_splits, return_rstd=True)("cuda")
    mixes, rstd = tk_mhc.mhc_pre_norm_fn(**inputs)
    num_splits = min(n_splits, mhc_mult * hidden // 64)
    mul, sqrsum = tk_mhc.mhc_prenorm_gemm(inputs["residual"], inputs["mhc_fn"] * inputs["mhc_norm_weight"], num_splits)
    total, squares = mul[0], sqrsum[0]
    for split in range(1, num_splits):
        total, squares = total + mul[split], squares + sqrsum[split]
    assert_equal(mixes, total * rstd[:, None])
    mean = squares.double() / (mhc_mult * hidden)
    torch.testing.assert_close(rstd.double(), torch.rsqrt(mean + inputs["mhc_norm_eps"]), rtol=1e-6, atol=0)
