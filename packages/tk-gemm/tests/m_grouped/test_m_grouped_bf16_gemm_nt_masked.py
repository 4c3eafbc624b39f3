"""m_grouped_bf16_gemm_nt_masked."""

from collections.abc import Callable
from typing import Any

import torch

import tk_gemm
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers

from ..compare import assert_close
from ..inputs import bf16


def masked_outputs(counts: tuple[int, ...], max_m: int, n: int, device: str) -> dict[str, Any]:
    """What arguments for groups of these counts have beside a and b; d has sevens in it."""
    return {
        "d": torch.full((len(counts), max_m, n), 7.0, dtype=torch.bfloat16, device=device),
        "masked_m": torch.tensor(counts, dtype=torch.int32, device=device),
        "expected_m": max(1, min(max_m, sum(counts) // len(counts))),
    }


def shared_cases(make: Callable[..., Make], n: int, k: int) -> list[Case]:
    """Cases of make(counts, max_m, n, k) for masked products; the small ones have this n, and this k or twice it."""
    return [
        Case(f"g3-n{n}-k{2 * k}", make((3, 0, 5), 5, n, 2 * k), small=True, modes=True),
        Case(f"g5-n{n}-k{k}-odd", make((0, 1, 127, 128, 129), 130, n, k), small=True),
        Case(f"g2-n{n}-k{k}-past-the-end", make((9, 2**31 - 1), 8, n, k), small=True),
        Case(f"g2-n{n}-k{k}-no-rows", make((0, 3), 0, n, k), small=True),
        Case("g32-n512-k7168", make((20,) * 32, 64, 512, 7168)),
        *(
            bench_case(f"g{g}-m{m}of{max_m}-n{n}-k{k}", make((m,) * g, max_m, n, k))
            for g, m, max_m, n, k in (
                (32, 192, 512, 4096, 7168),
                (6, 1024, 2048, 4096, 7168),
                (32, 20, 512, 4096, 7168),
                (32, 20, 512, 7168, 2048),
            )
        ),
    ]


def make(counts: tuple[int, ...], max_m: int, n: int, k: int) -> Make:
    """Arguments for groups of these counts."""

    def build(device: str) -> dict[str, Any]:
        a, b = bf16(len(counts), max_m, k, device=device), bf16(len(counts), n, k, device=device)
        return {"a": a, "b": b, **masked_outputs(counts, max_m, n, device)}

    return build


SPEC = OpSpec(
    op=tk_gemm.m_grouped_bf16_gemm_nt_masked,
    compare=assert_close,
    mutates=("d",),
    cases=(
        *shared_cases(make, 8, 64),
        Case("g8-n4096-k320", make((512, 0, 1, 127, 129, 256, 700, 512), 512, 4096, 320), compile=True),
        Case("g256-n264-k128", make((3, 0, 130, 128) * 64, 192, 264, 128)),
    ),
)


test_tiers = tiers.tests(SPEC)

COUNTS = torch.tensor([3, 0], dtype=torch.int32)
A, B = bf16(2, 5, 64, device="cpu"), bf16(2, 8, 64, device="cpu")


def test_by_hand() -> None:
    d = torch.full((2, 5, 8), 7.0, dtype=torch.bfloat16)
    tk_gemm.m_grouped_bf16_gemm_nt_masked(torch.ones_like(A), torch.ones_like(B) / 2, d, COUNTS, 3)
    assert d[0, :3].tolist() == [[32.0] * 8] * 3
    assert (d[0, 3:] == 7).all()
    assert (d[1] == 7).all()


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": None, "masked_m": COUNTS, "expected_m": 3},
    [
        ({"b": B[:1]}, ValueError, "^b"),
        ({"b": B[:, :4]}, ValueError, "^b"),
    ],
)
