"""reduce_fused."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, nearest_float32, tiers

from ..expand.test_expand_to_fused import make_maps, model_rows, random_bits
from ..expand.test_expand_to_fused_bwd import SMALL_ROUTING, edge_cases
from ..models import benches, name_of


def make(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    weights: bool = True,
    row_sf: bool = False,
    fp8_format: str = "",
    out_sf: float | None = None,
    num_rows: int | None = None,
    values: str = "normal",
    **routing: Any,
) -> Make:
    """Inputs of reduce_fused. Values: "normal", "bits" (every bit random), "ties".

    With "ties" many sums are 2**-54 off the midpoint of two float32, where rounding to float64 first gives a wrong
    result: 1 plus 65 / 64 times 16519105 * 2**-48, which is 2**-24 * (1 + 2**-30).
    """

    def build(device: str) -> dict[str, Any]:
        rows = model_rows(num_tokens, num_topk) if num_rows is None else num_rows

        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if values == "bits":
                return random_bits(shape, dtype, device)
            return torch.randn(shape, dtype=dtype, device=device)

        token_topk_to_pos, _ = make_maps(num_tokens, num_topk, rows, device, **routing)
        x = draw((rows, hidden), dtype)
        topk_weights = draw((num_tokens, num_topk), torch.float32)
        if values == "ties":
            x = torch.where(x > 0, 1, 65 / 64).to(dtype) * torch.where(x.abs() > 1.5, -1, 1).to(dtype)
            topk_weights = torch.where(topk_weights > 0, 1, 16519105 * 2.0**-48)
        inputs = {
            "x": (x, draw((rows,), torch.float32)) if row_sf else x,
            "topk_weights": topk_weights if weights else None,
            "token_topk_to_pos": token_topk_to_pos,
            "fp8_format": fp8_format,
            "out": None,
        }
        if out_sf is not None:
            inputs["sf"] = torch.full((1,), out_sf, device=device)
        return inputs

    return build


def make_with_out(make_inputs: Make) -> Make:
    """`make_inputs` with an `out` to write into."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_inputs(device)
        x = inputs["x"][0] if isinstance(inputs["x"], tuple) else inputs["x"]
        shape = (inputs["token_topk_to_pos"].shape[0], x.shape[1])
        dtype = torch.float8_e4m3fn if inputs["fp8_format"] else x.dtype
        return {**inputs, "out": torch.empty(shape, dtype=dtype, device=device)}

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the rows that have a token, of the maps and of the output: rows of padding need not be read."""
    x, row_sf = inputs["x"] if isinstance(inputs["x"], tuple) else (inputs["x"], None)
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    num_used = int((inputs["token_topk_to_pos"] >= 0).sum())
    total = num_used * (x.shape[1] * x.element_size() + (4 if row_sf is not None else 0))
    for tensor in (inputs["topk_weights"], inputs["token_topk_to_pos"], inputs.get("sf"), out):
        total += tensor.numel() * tensor.element_size() if tensor is not None else 0
    return total


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=tk_moe.reduce_fused,
    least_bytes=least_bytes,
    mutates=("out",),
    cases=(
        Case("bf16-h64-t7", make(7, 64, 3, **SMALL_ROUTING), small=True, modes=True, compile=True),
        Case("float32-h64-t7", make(7, 64, 3, _FLOAT32, **SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h192-t7-no-weights", make(7, 192, 3, weights=False, **SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h192-t7-row-sf", make(7, 192, 3, row_sf=True, **SMALL_ROUTING), small=True, compile=True),
        Case("float32-h192-t7-row-sf-alone", make(7, 192, 3, _FLOAT32, weights=False, row_sf=True, **SMALL_ROUTING)),
        Case(
            "bf16-h192-t7-e4m3",
            make(7, 192, 3, row_sf=True, fp8_format="e4m3", out_sf=37.3, **SMALL_ROUTING),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("bf16-h192-t7-e4m3-no-sf", make(7, 192, 3, fp8_format="e4m3", **SMALL_ROUTING), small=True, compile=True),
        Case(
            "float32-h192-t7-e4m3",
            make(7, 192, 3, _FLOAT32, fp8_format="e4m3", out_sf=-1e3, **SMALL_ROUTING),
            small=True,
        ),
        Case("bf16-h64-t7-out", make_with_out(make(7, 64, 3, **SMALL_ROUTING)), small=True, modes=True),
        Case("bf16-h64-t7-e4m3-out", make_with_out(make(7, 64, 3, fp8_format="e4m3", **SMALL_ROUTING)), small=True),
        *edge_cases(make),
        Case("bf16-h576-t67-no-position", make(67, 576, 4, num_rows=256, share_without_position=1.0)),
        Case("bf16-h576-t67-one-expert", make(67, 576, 4, num_rows=300, num_experts=1)),
        # NaN, infinities, subnormals, largest values; sums whose exact value is near the midpoint of two floats.
        Case("bf16-h576-t300-bits", make(300, 576, 3, values="bits", row_sf=True)),
        Case("float32-h576-t300-bits", make(300, 576, 3, _FLOAT32, values="bits")),
        Case("float32-h576-t300-e4m3-bits", make(300, 576, 3, _FLOAT32, values="bits", fp8_format="e4m3", out_sf=1.0)),
        Case("float32-h576-t300-ties", make(300, 576, 9, _FLOAT32, values="ties")),
        *(
            Case(f"{name_of(dtype)}-h576-t131-k{k}", make(131, 576, k, dtype, share_without_position=0.1))
            for dtype in (_BF16, _FLOAT32)
            for k in (1, 2, 3, 4, 5, 7)
            if dtype == _BF16 or k == 3
        ),
        Case("bf16-h576-t131-k32", make(131, 576, 32), compile=True),
        *(
            Case(f"bf16-h{hidden}-t{num_tokens}", make(num_tokens, hidden, num_topk))
            for hidden, num_topk in ((576, 9), (2048, 8), (4096, 6), (7168, 8))
            for num_tokens in (0, 1, 263, 264, 4001, 8001)
        ),
        Case("float32-h7168-t4001", make(4001, 7168, 4, _FLOAT32)),
        Case("bf16-h7168-t4001-e4m3", make(4001, 7168, 8, row_sf=True, fp8_format="e4m3", out_sf=11.0)),
        Case("bf16-h2560-t4001", make(4001, 2560, 8)),
        *benches("bf16-h7168-t{}", lambda t: make(t, 7168, 8), (4096,), models=(4096,), compile=True),
        *benches("bf16-h7168-t{}", lambda t: make(t, 7168, 8), (1, 64, 4001, 8001)),
        *benches("float32-h7168-t{}", lambda t: make(t, 7168, 8, _FLOAT32), (4096,)),
        *benches("bf16-h7168-t{}-e4m3", lambda t: make(t, 7168, 8, fp8_format="e4m3", out_sf=9.0), (4096,)),
        *benches("bf16-h{}-t4096", lambda h: make(4096, h, 8), (576, 2048, 2560, 3072, 4096, 6144)),
    ),
)


test_tiers = tiers.tests(SPEC)

POS = torch.tensor([[2, 0], [1, -1], [-1, -5], [0, 3]], dtype=torch.int32)


def round_to_float32(value: Fraction) -> float:
    """Nearest float32, ties to even, infinite where the values of float32 end."""
    rounded = nearest_float32(value)
    return float(rounded) if abs(rounded) < Fraction(2) ** 128 else math.copysign(math.inf, value)


def sum_exactly(x: list[float], scales: list[float]) -> float:
    """fma(x[k], scales[k], acc) for each k, in exact arithmetic with one rounding each."""
    acc = 0.0
    for value, scale in zip(x, scales, strict=True):
        acc = round_to_float32(Fraction(value) * Fraction(scale) + Fraction(acc))
    return acc


def reduce_values(x: list[float], scales: list[float]) -> float:
    """The same by reduce_fused: one token, one slot for each value."""
    rows = torch.tensor(x)[:, None].repeat(1, 64)
    pos = torch.arange(len(x), dtype=torch.int32)[None]
    out = tk_moe.reduce_fused(rows, torch.tensor(scales)[None], pos)
    assert (out.view(torch.int32) == out[0, 0].view(torch.int32)).all()
    return out[0, 0].item()


def test_rows_by_hand() -> None:
    x = torch.arange(1, 5, dtype=torch.float32)[:, None].repeat(1, 64)
    weights = torch.tensor([[0.5, 10.0], [2.0, math.nan], [1.0, 1.0], [-1.0, 0.25]])
    assert tk_moe.reduce_fused(x, weights, POS)[:, 5].tolist() == [11.5, 4.0, 0.0, 0.0]
    assert tk_moe.reduce_fused(x, None, POS)[:, 5].tolist() == [4.0, 2.0, 0.0, 5.0]
    row_sf = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert tk_moe.reduce_fused((x, row_sf), weights, POS)[:, 5].tolist() == [16.0, 8.0, 0.0, 7.0]
    assert tk_moe.reduce_fused((x.bfloat16(), row_sf), None, POS)[:, 5].tolist() == [13.0, 4.0, 0.0, 33.0]


@pytest.mark.parametrize(("low", "high"), [(-4, 4), (-75, -60), (-45, -30), (40, 63)])
def test_sums_are_fused_multiply_adds(low: int, high: int) -> None:
    count, num_topk = 500, 4
    mantissa = torch.randint(-(2**24), 2**24, (2, count, num_topk)).double()
    values = torch.ldexp(mantissa, torch.randint(low, high, mantissa.shape) - 24).float()
    for x, scales in zip(values[0].tolist(), values[1].tolist(), strict=True):
        expected = sum_exactly(x, scales)
        if math.isfinite(expected):
            assert reduce_values(x, scales) == expected


@pytest.mark.parametrize(
    ("first", "sign", "differs"),
    [(1.0, 1, True), (1 + 2**-23, 1, False), (1 + 2**-22, -1, True), (1 + 2**-23, -1, False)],
)
def test_sums_next_to_ties_are_rounded_once(first: float, sign: int, differs: bool) -> None:
    # 65/64 * 16519105 * 2**-48 is 2**-24 * (1 + 2**-30): a float64 sum with 1 loses the 2**-54.
    x, scales = [first, sign * 65 / 64], [1.0, 16519105 * 2.0**-48]
    assert reduce_values(x, scales) == sum_exactly(x, scales)
    naive = torch.tensor(x[1] * scales[1] + first, dtype=torch.float64).float().item()
    assert (naive != sum_exactly(x, scales)) == differs


def test_not_finite() -> None:
    inf, nan = math.inf, math.nan
    assert reduce_values([inf, 1.0], [1.0, 1.0]) == inf
    assert reduce_values([3e38, 3e38], [1.0, 1.0]) == inf
    assert reduce_values([3e38, -3e38], [2.0, 2.0]) != 0
    for x, scales in (([inf, -inf], [1.0, 1.0]), ([0.0], [inf]), ([nan, 1.0], [1.0, 1.0]), ([1.0, 1.0], [nan, 0.0])):
        assert math.isnan(reduce_values(x, scales))


def test_zeros_are_positive_and_slots_without_position_do_not_count() -> None:
    x = torch.full((4, 64), -0.0)
    out = tk_moe.reduce_fused(x, torch.tensor([[1.0, 1.0]]).repeat(4, 1), POS)
    assert (out.view(torch.int32) == 0).all()
    weights = torch.full((4, 2), math.nan)
    assert tk_moe.reduce_fused(x, weights, torch.full_like(POS, -1)).tolist() == [[0.0] * 64] * 4
    past_the_end = torch.tensor([[4, 2**31 - 1]] * 4, dtype=torch.int32)
    assert tk_moe.reduce_fused(x, weights, past_the_end).tolist() == [[0.0] * 64] * 4


def test_e4m3_rounds_to_even_and_saturates() -> None:
    values = [0.0, 1.0, 1.0625, 1.1875, 447.9, 465.0, 1e30, math.inf, -math.inf, 2.0**-10, 3 * 2.0**-10, -(2.0**-9)]
    codes = [0x00, 0x38, 0x38, 0x3A, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x00, 0x02, 0x81]
    x = torch.tensor(values)[:, None].repeat(1, 64)
    pos = torch.arange(len(values), dtype=torch.int32)[:, None]
    out = tk_moe.reduce_fused(x, None, pos, "e4m3")
    assert out.dtype == torch.float8_e4m3fn
    assert out.view(torch.uint8)[:, 9].tolist() == codes
    nan = tk_moe.reduce_fused(torch.full((1, 64), -math.nan), None, pos[:1], "e4m3")
    assert nan.view(torch.uint8).unique().tolist() == [0x7F]
    scaled = tk_moe.reduce_fused(x, None, pos, "e4m3", torch.tensor([2.0]))
    assert scaled.float()[:7, 0].tolist() == [0.0, 2.0, 2.0, 2.5, 448.0, 448.0, 448.0]


def test_output_scalar_is_applied_in_float32() -> None:
    # In float32 the product is 17.0 * 2**-4, a tie; exactly it is just above, and would round up.
    value, factor = 1 + 2**-12, (17 / 16) / (1 + 2**-12)
    x = torch.full((1, 64), value)
    sf = torch.tensor([factor])
    product = x[0, 0] * sf[0]
    out = tk_moe.reduce_fused(x, None, torch.zeros((1, 1), dtype=torch.int32), "e4m3", sf)
    assert torch.equal(out[0, 0].float(), product.to(torch.float8_e4m3fn).float())


def test_out_is_written_and_returned() -> None:
    x = torch.randn(4, 128).bfloat16()
    out = torch.full((4, 128), math.nan, dtype=torch.bfloat16)
    assert tk_moe.reduce_fused(x, None, POS, out=out) is out
    assert torch.equal(out, tk_moe.reduce_fused(x, None, POS))


X = torch.ones(5, 64)
GOOD = {"x": X, "topk_weights": torch.ones(4, 2), "token_topk_to_pos": POS}

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"x": torch.ones(5, 96)}, ValueError, "hidden"),
        ({"x": (X, torch.ones(4))}, ValueError, r"x\[1\]"),
        ({"topk_weights": torch.ones(4, 3)}, ValueError, "topk_weights"),
        ({"token_topk_to_pos": POS[:, :0]}, ValueError, "token_topk_to_pos"),
        ({"sf": torch.ones(1)}, ValueError, "sf"),
        ({"out": torch.empty(4, 64).bfloat16()}, TypeError, "out"),
        ({"out": torch.empty(4, 64), "fp8_format": "e4m3"}, TypeError, "out"),
        ({"out": torch.empty(5, 64)}, ValueError, "out"),
    ],
)
