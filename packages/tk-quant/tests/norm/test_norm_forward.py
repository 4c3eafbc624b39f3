"""norm_forward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.trees import distinct_bytes
from tk_quant.norm.tile import lanes_of

from ..per_token.test_per_token_cast import BENCH, extremes

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
MakeRows = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


def normal(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows with scales of their own."""
    scale = torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), device=device).float())
    return (torch.randn(shape, device=device) * scale).to(dtype)


def apart(extra: int, first: int = 0) -> MakeRows:
    """Rows with a gap of `extra` elements, the first `first` of them before the row."""

    def build(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        *leading, hidden = shape
        return normal(device, (*leading, hidden + extra), dtype)[..., first : first + hidden]

    return build


def transposed(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """(B, T, H) out of memory (T, B, H)."""
    return normal(device, (shape[1], shape[0], shape[2]), dtype).transpose(0, 1)


def expanded(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same rows in each batch."""
    return normal(device, (1, *shape[1:]), dtype).expand(shape)


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: MakeRows = normal,
    weight: torch.dtype | None = FP32,
    row_weights: bool = False,
    residual: bool = False,
    eps: float = EPS,
    into: str = "",
    **options: Any,
) -> Make:
    """Arguments of the op; `into` names arguments that it writes: "new" tensors, or "same" as those that it reads."""

    def build(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "x": rows(device, shape, dtype),
            "weight": None,
            "eps": eps,
            "residual": None,
            **options,
        }
        kwargs |= {"out": None, "residual_out": None}
        if weight is not None:
            of_weight = shape[-2:] if row_weights else shape[-1:]
            kwargs["weight"] = (1 + 0.5 * torch.randn(of_weight, device=device)).to(weight)
        if residual:
            kwargs["residual"] = rows(device, shape, dtype)
        if into == "new":
            kwargs["out"] = rows(device, shape, dtype)
        elif into == "same":
            kwargs["out"] = kwargs["x"]
        if into and residual:
            kwargs["residual_out"] = rows(device, shape, dtype) if into == "new" else kwargs["residual"]
        return kwargs

    return build


def case(shape: tuple[int, ...], dtype: torch.dtype, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{NAMES[dtype]}-{'x'.join(map(str, shape))}{suffix}"
    return Case(name, make(shape, dtype, **more), **dict.fromkeys(roles.split(), True))


def bench(shape: tuple[int, ...], dtype: torch.dtype, suffix: str = "", roles: str = "", **more: Any) -> Case:
    flags = {**BENCH, **dict.fromkeys(roles.split(), True)}
    name = f"{NAMES[dtype]}-{'x'.join(map(str, shape))}{suffix}-bench"
    return Case(name, make(shape, dtype, **{"weight": dtype, **more}), **flags)


def extreme_rows(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, infinity, NaN, subnormals, the largest values and random bits."""
    return extremes(shape[-1], dtype)(device)


HIDDEN = (8, 16, 24, 64, 128, 264, 512, 520, 576, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 8200, 12288, 16384)
"""Of every number of lanes and pieces some, whole and with idle lanes."""

SPEC = OpSpec(
    op=tk_quant.norm_forward,
    mutates=("out", "residual_out"),
    least_bytes=lambda kwargs, outputs: distinct_bytes((kwargs, outputs)),
    cases=(
        # One lane, several lanes, half a vector at the end, idle lanes, several warps, several pieces.
        case((5, 8), BF16, "-one-lane", "small modes", with_rstd=True),
        case((33, 72), BF16, "-half", "small", residual=True, with_rstd=True),
        case((9, 1000), BF16, "-idle", "small compile", weight=BF16, residual=True, with_rstd=True),
        case((7, 264), FP32, "-idle", "small", residual=True),
        case((3, 16384), FP32, "-pieces", "small compile", residual=True, with_rstd=True),
        case((2, 16384), BF16, "-pieces", "small", weight=BF16),
        # Options, each alone; without any weight.
        case((9, 320), BF16, "-plain", "small compile", weight=None),
        case((9, 320), BF16, "-scaled", "small", weight=None, out_scale=0.3, weight_offset=1.0),
        case((9, 320), BF16, "-rounded", "small modes compile", round_before_weight=True),
        case((9, 320), FP32, "-rounded", "small", round_before_weight=True),
        case((9, 320), BF16, "-gemma", "small", weight=BF16, weight_offset=1.0, residual=True),
        case((9, 320), BF16, "-eps", "small", eps=3),
        # Batches, strides, weights of rows.
        case((3, 5, 64), BF16, "-batches", "small modes", residual=True, with_rstd=True),
        case((3, 5, 64), BF16, "-apart", "small", rows=apart(24), residual=True, into="new"),
        case((3, 5, 64), FP32, "-unaligned", "small compile", rows=apart(3, 1), residual=True, into="new"),
        case((33, 128), BF16, "-unaligned", "small", rows=apart(5, 3), with_rstd=True),
        case((4, 7, 72), BF16, "-transposed", "small", rows=transposed, residual=True, into="new"),
        case((4, 7, 64), BF16, "-expanded", "small", rows=expanded),
        case((5, 4, 512), BF16, "-row-weights", "small modes compile", row_weights=True, residual=True),
        case((4, 1032), FP32, "-row-weights", "small", row_weights=True),
        case((2, 3, 5, 64), FP32, "-four-dims", "small", residual=True, with_rstd=True),
        case((2, 1, 5, 64), BF16, "-four-dims-apart", "small", rows=apart(8), row_weights=True),
        # In place.
        case((9, 320), BF16, "-in-place", "small modes", residual=True, into="same"),
        case((3, 5, 64), FP32, "-in-place", "small", rows=apart(24), into="same"),
        # No rows, one row.
        case((0, 128), BF16, "", "small", residual=True, with_rstd=True),
        case((3, 0, 64), FP32, "", "small", with_rstd=True),
        case((1, 7168), BF16, "", "small", residual=True),
        # Zeros, infinity, NaN, subnormals, random bits.
        *(
            case((24, 256), dtype, f"-extremes{suffix}", "small", rows=extreme_rows, **more)
            for dtype in (BF16, FP32)
            for suffix, more in (
                ("", {"with_rstd": True}),
                ("-scaled", {"out_scale": 1e30, "eps": 0, "residual": True}),
            )
        ),
        # Sizes of real models; the order of the sum at every number of lanes.
        *(case((257, hidden), BF16, residual=True, with_rstd=True) for hidden in HIDDEN),
        *(case((131, hidden), FP32, with_rstd=True) for hidden in HIDDEN),
        case((8001, 7168), BF16, residual=True, with_rstd=True),
        case((4001, 7168), BF16, "-rounded", weight=BF16, residual=True, round_before_weight=True),
        case((4001, 7168), FP32, residual=True, into="same"),
        case((4001, 8, 128), BF16, "-heads", rows=apart(128), weight=BF16, with_rstd=True),
        case((2001, 4, 4096), BF16, "-streams", row_weights=True, with_rstd=True),
        case((300001, 7168), BF16, "-large", weight=BF16),
        # Benchmarks.
        bench((8192, 7168), BF16, "", "model_shape"),
        bench((8192, 7168), BF16, "-residual", "model_shape compile", residual=True),
        bench((8192, 7168), FP32),
        bench((4096, 16384), BF16),
        bench((524288, 128), BF16),
        *(bench((8192, hidden), BF16) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
        *(bench((num_tokens, 7168), BF16, "-residual", residual=True) for num_tokens in (1, 64, 4001, 8001)),
    ),
)


test_tiers = tiers.tests(SPEC)

op = tk_quant.norm_forward


def hand_rows(device: str) -> torch.Tensor:
    return torch.tensor([[2.0] * 8, [0.0] * 8, [-1.0, 1.0, -7.0, 7.0, -1.0, 1.0, -7.0, 7.0]], device=device)


def test_by_hand(device: str) -> None:
    x = hand_rows(device)
    out, rstd, norm_input = op(x, None, 0.25, with_rstd=True)
    assert rstd.tolist() == [
        float(np.float32(1) / np.sqrt(np.float32(4.25))),
        2.0,
        float(np.float32(1) / np.sqrt(np.float32(25.25))),
    ]
    assert norm_input is x
    assert_equal(out, x * rstd.unsqueeze(1))
    # Mean squares of 4, 0 and 25.
    out, _, norm_input = op(x, torch.full((8,), 3.0, device=device), 0.0, torch.zeros_like(x), out_scale=2.0)
    assert out[0].tolist() == [6.0] * 8
    assert out[1].isnan().all()
    assert_equal(norm_input, x)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("hidden", [8, 72, 1000, 7168, 16384])
def test_rstd_to_float64(device: str, hidden: int, dtype: torch.dtype) -> None:
    x, residual = (normal(device, (64, hidden), dtype) for _ in range(2))
    out, rstd, norm_input = op(x, None, EPS, residual, with_rstd=True)
    assert_equal(norm_input, x + residual)
    exact = (norm_input.double().square().mean(-1) + EPS).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=4e-7, atol=0)
    assert_equal(out, (norm_input.float() * rstd.unsqueeze(1)).to(dtype))


@pytest.mark.parametrize("rounds", [False, True])
def test_against_numpy(device: str, rounds: bool) -> None:
    """Given rstd, each step is one rounded operation."""
    x, weight = normal(device, (16, 384), BF16), torch.randn(384, device=device)
    options = {"out_scale": 0.7, "weight_offset": 1.0, "round_before_weight": rounds}
    out, rstd, _ = op(x, weight, EPS, with_rstd=True, **options)
    values, factor, each = x.float().cpu().numpy(), weight.cpu().numpy(), rstd.cpu().numpy()[:, None]
    factor = (factor + np.float32(1)) * np.float32(0.7)
    scaled = values * each
    if rounds:
        scaled = torch.from_numpy(scaled).bfloat16().float().numpy()
    assert_equal(out.cpu(), torch.from_numpy(scaled * factor).bfloat16())
    other = op(x, weight, EPS, **{**options, "round_before_weight": not rounds})[0]
    assert not torch.equal(out, other)


def test_as_llama_rounds() -> None:
    """Hugging Face's LlamaRMSNorm, with rstd as the op has it."""
    x, weight = normal("cpu", (64, 512), BF16), torch.randn(512).bfloat16()
    out, rstd, _ = op(x, weight, EPS, with_rstd=True, round_before_weight=True)
    assert_equal(out, weight * (x.float() * rstd.unsqueeze(1)).to(BF16))


def test_a_weight_of_minus_zero(device: str) -> None:
    x, weight = torch.ones(1, 8, device=device), torch.full((8,), -0.0, device=device)
    assert op(x, weight, EPS)[0].signbit().all()
    assert not op(x, weight, EPS, weight_offset=1e-30)[0].signbit().any()


@pytest.mark.parametrize("hidden", [64, 1000, 7168])
def test_bits_depend_on_no_other_row_and_no_option(device: str, hidden: int) -> None:
    x, weight = normal(device, (37, hidden), BF16), torch.randn(hidden, device=device)
    out, rstd, _ = op(x, weight, EPS, with_rstd=True)
    assert_equal(op(x, weight, EPS)[0], out)
    assert_equal(op(x, weight, EPS, torch.zeros_like(x), with_rstd=True)[:2], (out, rstd))
    assert_equal(op(x[5:6], weight, EPS, with_rstd=True)[:2], (out[5:6], rstd[5:6]))
    wide = torch.cat([x, x], dim=1)[:, :hidden]
    assert_equal(op(wide.unflatten(0, (37, 1)), weight, EPS)[0].flatten(0, 1), out)


def test_each_row_its_weight(device: str) -> None:
    x, weight = normal(device, (5, 3, 64), BF16), torch.randn(3, 64, device=device)
    expected = torch.stack([op(x[:, g], weight[g], EPS)[0] for g in range(3)], dim=1)
    assert_equal(op(x, weight, EPS)[0], expected)


def test_order_of_the_sum() -> None:
    """Lanes take vectors of 32 bytes in turn; a lane's large value is lost to no other lane's small ones."""
    for dtype in (BF16, FP32):
        vec, lanes, pieces = lanes_of(16384, dtype)
        assert (vec, lanes, pieces) == (32 // dtype.itemsize, 512, 64 * dtype.itemsize // 64 * 1)
        x = torch.full((1, 16384), 2.0**-7, dtype=dtype)
        x[0, 0] = 2.0**6
        # Lane 0 rounds its first square plus 2**-14 down, each time; the others are exact.
        lost = vec * pieces - 1
        expected = np.float32(2.0**12 + (16384 - 1 - lost) * 2.0**-14) / np.float32(16384)
        rstd = op(x, None, 0.0, with_rstd=True)[1]
        assert rstd.item() == np.float32(1) / np.sqrt(expected)


X = torch.ones(2, 3, 16)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "weight": None, "eps": EPS},
    [
        ({"x": torch.ones(3, 12)}, ValueError, "x: .*multiple of 8 channels"),
        ({"x": torch.ones(3, 0)}, ValueError, "x: .*1 to 16384 channels"),
        ({"x": torch.ones(3, 16392)}, ValueError, "x: .*1 to 16384 channels"),
        ({"x": torch.ones(4, 3, 2, 16).transpose(0, 1)}, ValueError, "x: .*fold into one"),
        ({"weight": torch.ones(8)}, ValueError, "weight: .*shape"),
        ({"weight": torch.ones(2, 16)}, ValueError, "weight: .*shape"),
        ({"weight": torch.ones(16, dtype=BF16)}, TypeError, "weight: .*float32"),
        ({"eps": -1e-6}, ValueError, "eps: .*at least 0"),
        ({"residual": torch.ones(3, 2, 16)}, ValueError, "residual: .*shape"),
        ({"residual": X.bfloat16()}, TypeError, "residual: .*float32"),
        ({"out": torch.ones(6, 16)}, ValueError, "out: .*shape"),
        ({"residual": X.clone(), "residual_out": torch.ones(2, 3, 8)}, ValueError, "residual_out: .*shape"),
        ({"out": torch.ones(1, 1, 16).expand(2, 3, 16)}, ValueError, "out: .*apart in memory"),
    ],
)


def test_what_is_written_shares_no_memory() -> None:
    buffer = torch.ones(3, 64)
    with pytest.raises(ValueError, match="out: expected memory of its own, got some of x"):
        op(buffer[:, :32], None, EPS, out=buffer[:, 16:48])
    with pytest.raises(ValueError, match="out: expected memory of its own, got some of residual"):
        op(torch.ones(3, 32), None, EPS, buffer[:, 32:], out=buffer[:, 32:])
