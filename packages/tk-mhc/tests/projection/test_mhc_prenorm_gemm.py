"""mhc_prenorm_gemm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.poison import poisoned_allocations
from tk_mhc import reference

from ..compare import assert_relative_error
from ..inputs import HIDDEN_SIZES, STREAM_SHAPES, TOKEN_COUNTS
from .test_mhc_pre_norm_fn import MODEL_SCALE, RELATIVE_ERROR, draw_fn, rows_of_fn


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    n_splits: int = 16,
    *,
    num_rms_groups: int = 1,
    head: bool = False,
    has_comb: bool = True,
    scale: float = MODEL_SCALE,
) -> Make:
    """Normal residual and fn. `head`: fn has m rows, not m(m + 2); without comb 2m."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_rows = rows_of_fn(mhc_mult, head, has_comb)
        return {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            "fn": draw_fn(num_rows, mhc_mult * hidden, scale, device),
            "n_splits": n_splits,
            "num_rms_groups": num_rms_groups,
        }

    return build


def compare(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Each split of mul within the relative error of mixes, sums of squares within 1e-5; empty splits are 0."""
    for name, x, y in zip(("mul", "sqrsum"), actual, expected, strict=True):
        assert_same_metadata(x, y, name)
    for split, (x, y) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert_relative_error(x, y, RELATIVE_ERROR, f"mul[{split}]")
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=0)


def split_cases(make: Callable[..., Make], compiled: bool, **options: float) -> list[Case]:
    """Cases of make(num_tokens, mhc_mult, hidden, n_splits); those for benchmarks have `options`.

    `compiled`: the compile tier compiles those of a model's shape.
    """
    return [
        *(
            Case(f"m4-h{hidden}-t{num_tokens}-splits7", make(num_tokens, 4, hidden, 7))
            for hidden in HIDDEN_SIZES
            for num_tokens in ((65, 4096) if hidden != 7168 else TOKEN_COUNTS)
        ),
        *(Case(f"m{m}-h{hidden}-t{t}-splits16", make(t, m, hidden)) for m, hidden, t in STREAM_SHAPES),
        *(
            bench_case(f"m4-h7168-t{t}-splits{n}", make(t, n_splits=n, **options), model_shape=True, compile=compiled)
            for t, n in ((64, 16), (8192, 1))
        ),
        *(
            bench_case(f"m4-h7168-t{t}-splits{n}", make(t, n_splits=n, **options))
            for t, n in ((1, 16), (128, 16), (1024, 4), (4001, 1), (8001, 1), (8192, 16))
        ),
        *(
            bench_case(f"m4-h{hidden}-t8192-splits1", make(8192, 4, hidden, 1, **options))
            for hidden in (576, 2048, 2560, 4096)
        ),
    ]


SPEC = OpSpec(
    op=tk_mhc.mhc_prenorm_gemm,
    compare=compare,
    cases=(
        Case("m4-h64-t3-splits2", make(3, 4, 64, 2), small=True, modes=True),
        Case("m2-h64-t17-splits1", make(17, 2, 64, 1), small=True),
        Case("m8-h64-t3-splits3", make(3, 8, 64, 3), small=True, compile=True),
        # Splits of two lengths; one per block of channels; more, so that some are empty; more than twice as many.
        *(Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits), small=True) for n_splits in (5, 12, 13, 31)),
        Case("m4-h128-t17-splits3-head", make(17, 4, 128, 3, head=True), small=True),
        Case("m8-h128-t17-splits3-no-comb", make(17, 8, 128, 3, has_comb=False), small=True),
        Case(
            "m4-h192-t3-splits2-groups4",
            make(3, 4, 192, 2, num_rms_groups=4),
            small=True,
            modes=True,
            compile=True,
        ),
        # A group of several streams, one that ends within a stream, one block per group, empty splits.
        Case("m4-h64-t17-splits1-groups2", make(17, 4, 64, 1, num_rms_groups=2), small=True),
        Case("m2-h192-t3-splits2-groups3", make(3, 2, 192, 2, num_rms_groups=3), small=True),
        Case("m4-h64-t3-splits3-groups4", make(3, 4, 64, 3, num_rms_groups=4), small=True),
        Case("m8-h64-t3-splits2-groups2-head", make(3, 8, 64, 2, num_rms_groups=2, head=True), small=True),
        Case("m4-h64-no-leading-splits2", make((), 4, 64, 2), small=True),
        Case("m4-h64-t2x3-splits2", make((2, 3), 4, 64, 2), small=True),
        Case("m4-h64-t0-splits2", make(0, 4, 64, 2), small=True),
        Case("m4-h64-t2x0-splits2-groups2", make((2, 0), 4, 64, 2, num_rms_groups=2), small=True),
        *split_cases(make, compiled=True),
        *(Case(f"m4-h7168-t129-splits{n_splits}", make(129, n_splits=n_splits)) for n_splits in (1, 2, 16, 448, 1000)),
        *(Case(f"m4-h7168-t1000-splits4-groups{g}", make(1000, n_splits=4, num_rms_groups=g)) for g in (2, 4, 7, 448)),
        Case("m4-h7168-t8192-splits1-scale1", make(8192, n_splits=1, scale=1.0)),
        Case("m4-h7168-t64-splits16-head", make(64, head=True)),
        bench_case("m4-h7168-t8192-splits1-groups4", make(8192, n_splits=1, num_rms_groups=4)),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize(
    ("n_splits", "mul", "sqrsum"),
    [
        (1, [640], [1920]),
        (2, [192, 448], [320, 1600]),
        # ⌊s · 4/3⌋ = 0, 1, 2, 4: the last split is the longest.
        (3, [64, 128, 448], [64, 256, 1600]),
        (4, [64, 128, 192, 256], [64, 256, 576, 1024]),
        # ⌊s · 4/6⌋ = 0, 0, 1, 2, 2, 3, 4: splits 0 and 3 are empty.
        (6, [0, 64, 128, 0, 192, 256], [0, 64, 256, 0, 576, 1024]),
    ],
)
def test_by_hand(n_splits: int, mul: list[float], sqrsum: list[float], device: str) -> None:
    # Four blocks of 64 channels: all 1, all 2, all 3, all 4. Their sums are 64, 128, 192, 256.
    block = torch.arange(1.0, 5.0, device=device)[:, None].repeat(1, 64).bfloat16()
    residual = torch.stack([block, -2 * block])
    factors = torch.arange(1.0, 25.0, device=device)
    fn = factors[:, None].repeat(1, 256)
    actual_mul, actual_sqrsum = tk_mhc.mhc_prenorm_gemm(residual, fn, n_splits)
    sums = torch.tensor(mul, dtype=torch.float32, device=device)
    assert torch.equal(actual_mul, torch.stack([sums, -2 * sums], dim=1)[..., None] * factors)
    squares = torch.tensor(sqrsum, dtype=torch.float32, device=device)
    assert torch.equal(actual_sqrsum, torch.stack([squares, 4 * squares], dim=1))


def test_groups_by_hand(device: str) -> None:
    residual = torch.arange(1.0, 5.0, device=device)[:, None].repeat(1, 64).bfloat16()
    fn = torch.arange(1.0, 25.0, device=device)[:, None].repeat(1, 256)
    for n_splits, groups, mul, sqrsum in (
        (1, 2, [[192, 448]], [[320, 1600]]),
        (2, 2, [[64, 192], [128, 256]], [[64, 576], [256, 1024]]),
        (3, 2, [[0, 0], [64, 192], [128, 256]], [[0, 0], [64, 576], [256, 1024]]),
        (1, 4, [[64, 128, 192, 256]], [[64, 256, 576, 1024]]),
    ):
        actual_mul, actual_sqrsum = tk_mhc.mhc_prenorm_gemm(residual, fn, n_splits, num_rms_groups=groups)
        assert actual_mul.shape == (n_splits, 1, groups, 24)
        assert actual_mul[:, 0, :, 0].tolist() == mul
        assert actual_mul[:, 0, :, 23].tolist() == [[24 * x for x in split] for split in mul]
        assert actual_sqrsum.tolist() == [[split] for split in sqrsum]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("mhc_mult", "n_splits"), [(2, 1), (4, 5), (8, 7)])
def test_splits_make_the_whole(mhc_mult: int, n_splits: int, head: bool) -> None:
    inputs = make(17, mhc_mult, 192, n_splits, head=head)("cpu")
    x = inputs["residual"].flatten(1).double()
    mul, sqrsum = tk_mhc.mhc_prenorm_gemm(**inputs)
    assert_relative_error(mul.sum(0), x @ inputs["fn"].double().T, RELATIVE_ERROR)
    torch.testing.assert_close(sqrsum.sum(0), x.square().sum(-1).float())


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64, 2)("cpu"),
    [
        ({"residual": torch.ones(3, 3, 64).bfloat16()}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"fn": torch.ones(12, 256)}, ValueError, r"\bfn\b"),
        ({"n_splits": 0}, ValueError, "n_splits.*1 to 1024"),
        ({"n_splits": 1025}, ValueError, "n_splits.*1 to 1024"),
        ({"num_rms_groups": 0}, ValueError, "num_rms_groups.*1 to 4"),
        ({"num_rms_groups": 3}, ValueError, "num_rms_groups.*multiple of 64"),
        ({"num_rms_groups": 8}, ValueError, "num_rms_groups.*1 to 4"),
    ],
)


@pytest.mark.gpu(gib=2)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
def test_gpu_every_split_is_accurate(num_tokens: int, scale: float) -> None:
    inputs = make(num_tokens, n_splits=7, scale=scale)("cuda")
    mul, _ = tk_mhc.mhc_prenorm_gemm(**inputs)
    expected, _ = reference.mhc_prenorm_gemm(inputs["residual"], inputs["fn"].double(), 7)
    for split in range(7):
        assert_relative_error(mul[split], expected[split], RELATIVE_ERROR, f"split {split}")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 65, 1000])
def test_gpu_empty_splits_are_zero(num_tokens: int) -> None:
    inputs = make(num_tokens, 4, 192, 25)("cuda")
    with poisoned_allocations():
        tk_mhc.mhc_prenorm_gemm(**inputs)
        # A repeated call must not only launch the kernels, which leave these out.
        mul, sqrsum = tk_mhc.mhc_prenorm_gemm(**inputs)
    zeros: list[Tensor] = []
    for split in range(25):
        # 12 blocks for 25 splits.
        if split * 12 // 25 == (split + 1) * 12 // 25:
            zeros += [mul[split], sqrsum[split]]
        else:
            assert mul[split].ne(0).any(-1).all()
            assert sqrsum[split].gt(0).all()
    assert len(zeros) == 26
    assert all(bool(x.view(torch.int32).eq(0).all()) for x in zeros)
