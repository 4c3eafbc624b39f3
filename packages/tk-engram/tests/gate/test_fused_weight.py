"""fused_weight."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, bench_case, empty, tiers


def make(
    mhc_mult: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    embed_dtype: torch.dtype | None = None,
    first_element: int = 0,
) -> Make:
    """Normal weights, which begin at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        dtypes = {"weight_hidden": dtype, "weight_embed": embed_dtype or dtype}
        return {
            name: empty(mhc_mult, hidden, dtype=dtype, device=device, first_element=first_element).normal_()
            for name, dtype in dtypes.items()
        }

    return build


SPEC = OpSpec(
    op=tk_engram.fused_weight,
    cases=(
        Case("bf16-m4-h64", make(4, 64), small=True, modes=True),
        Case("fp32-m1-h1088", make(1, 1088, torch.float32), small=True, modes=True),
        Case("fp32-bf16-m2-h576", make(2, 576, torch.float32, torch.bfloat16), small=True, compile=True),
        Case("bf16-fp32-m3-h192", make(3, 192, torch.bfloat16, torch.float32), small=True),
        Case("bf16-m8-h128-unaligned", make(8, 128, first_element=1), small=True),
        *(Case(f"bf16-m4-h{hidden}", make(4, hidden)) for hidden in (576, 2560, 8192)),
        Case("fp32-m8-h16384", make(8, 16384, torch.float32)),
        bench_case("bf16-m4-h7168", make(4, 7168), model_shape=True),
        bench_case("fp32-m4-h7168", make(4, 7168, torch.float32)),
        *(bench_case(f"bf16-m4-h{hidden}", make(4, hidden)) for hidden in (2048, 4096)),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_by_hand(dtype: torch.dtype, device: str) -> None:
    hidden = torch.tensor([[1.5, -2.0] * 32, [0.0, 1.0] * 32], dtype=dtype, device=device)
    embed = torch.tensor([[3.0, 0.25] * 32, [7.0, -1.0] * 32], dtype=dtype, device=device)
    out = tk_engram.fused_weight(hidden, embed)
    assert out.dtype == torch.float32
    assert out[:, :2].tolist() == [[4.5, -0.5], [0.0, -1.0]]


def test_products_of_bfloat16_are_exact(device: str) -> None:
    # 129/128 · 129/128 has 15 bits, which bfloat16 does not hold.
    weight = torch.full((1, 64), 129 / 128, device=device).bfloat16()
    assert tk_engram.fused_weight(weight, weight)[0, 0].item() == (129 / 128) ** 2


WEIGHT = torch.ones(2, 64, dtype=torch.bfloat16)


test_bad_input = tiers.bad_input(
    SPEC,
    {"weight_hidden": WEIGHT, "weight_embed": WEIGHT},
    [
        ({"weight_hidden": WEIGHT[:0]}, ValueError, "hc_mult .*weight_hidden.*1 to 8"),
        ({"weight_hidden": torch.ones(9, 64)}, ValueError, "hc_mult .*weight_hidden.*1 to 8"),
        ({"weight_hidden": torch.ones(2, 96)}, ValueError, "hidden .*weight_hidden.*multiple of 64"),
        ({"weight_hidden": torch.ones(2, 16448)}, ValueError, "hidden .*weight_hidden.*64 to 16384"),
        ({"weight_embed": WEIGHT[:1]}, ValueError, "weight_embed: .*shape"),
    ],
)
