"""normalize_weight."""

import struct
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, nearest_float32, tiers

from ..models import benches


def make(num_tokens: int, num_topk: int, values: str = "uniform") -> Make:
    """Weights that are `uniform`, `zeros`, of all magnitudes (`wide`), or full of ∞ and subnormals (`extremes`)."""

    def build(device: str) -> dict[str, Any]:
        shape = (num_tokens, num_topk)
        if values == "uniform":
            return {"topk_weights": torch.rand(shape, device=device)}
        if values == "zeros":
            return {"topk_weights": torch.zeros(shape, device=device)}
        if values == "wide":
            w = torch.randn(shape, device=device) * torch.exp2(torch.randint(-140, 120, shape, device=device))
            return {"topk_weights": w}
        table = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-20, -1e-20, 3e38, 1.0, torch.inf], device=device)
        return {"topk_weights": table[torch.randint(0, len(table), shape, device=device)]}

    return build


SPEC = OpSpec(
    op=tk_moe.normalize_weight,
    cases=(
        # Vectors of 4, 2 and 1 weights.
        Case("k8-t67", make(67, 8), small=True, modes=True, compile=True),
        Case("k6-t67", make(67, 6), small=True, compile=True),
        Case("k9-t67", make(67, 9), small=True, compile=True),
        Case("k32-t3", make(3, 32), small=True, compile=True),
        Case("k1-t3", make(3, 1), small=True),
        Case("k8-t0", make(0, 8), small=True),
        Case("k8-t1", make(1, 8), small=True),
        Case("k8-t67-zeros", make(67, 8, "zeros"), small=True),
        Case("k7-t67-wide", make(67, 7, "wide"), small=True),
        # ∞ / ∞ gives different NaNs on CPUs, so this case runs only on the GPU.
        Case("k3-t4001-extremes", make(4001, 3, "extremes")),
        *(
            Case(f"k{num_topk}-t{num_tokens}-wide", make(num_tokens, num_topk, "wide"))
            for num_topk in (1, 2, 6, 7, 8, 9)
            for num_tokens in (0, 1, 2, 31, 4001, 8001)
        ),
        *benches(
            "k{}-t{}",
            lambda k, t: make(t, k),
            ((8, 8192), (8, 1), (8, 64), (8, 4001), (8, 8001), (6, 8192), (9, 8192)),
            models=((8, 8192),),
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    denominator, normalized = tk_moe.normalize_weight(torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert denominator.tolist() == [4.0, torch.tensor(1e-20).item()]
    assert normalized.tolist() == [[0.25, 0.5, 0.25], [0.0, 0.0, 0.0]]


def test_sum_is_in_order() -> None:
    # 2^24 + 1 rounds down to 2^24 each time; the other way around the ones would count.
    denominator, _ = tk_moe.normalize_weight(torch.tensor([[2.0**24, 1.0, 1.0], [1.0, 1.0, 2.0**24]]))
    assert denominator.tolist() == [2.0**24, 2.0**24 + 2]


def test_no_weight_at_all_divides_by_the_small_constant() -> None:
    _, normalized = tk_moe.normalize_weight(torch.tensor([[0.0, 1e-30]]))
    assert normalized.tolist() == [[0.0, (torch.tensor(1e-30) / torch.tensor(1e-20)).item()]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(2.0**-30, 2.0**30, width=32), min_size=1, max_size=9))
def test_reference_against_exact_arithmetic(weights: list[float]) -> None:
    total = Fraction(struct.unpack("<f", struct.pack("<f", 1e-20))[0])
    for weight in weights:
        total = nearest_float32(total + Fraction(weight))
    denominator, normalized = tk_moe.normalize_weight(torch.tensor([weights]))
    assert Fraction(denominator.item()) == total
    assert [Fraction(x) for x in normalized[0].tolist()] == [
        nearest_float32(Fraction(weight) / total) for weight in weights
    ]


test_bad_input = tiers.bad_input(
    SPEC,
    {},
    [({"topk_weights": torch.zeros(2, 33)}, ValueError, "topk_weights.*1 to 32")],
)
