"""router_gemm_nt."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import num_sms
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, assert_same_metadata, calc_diff
from tk_core.testing.trees import tensors
from tk_gemm.hopper.router_config import RUN, Cut, Plan, RouterConfig
from tk_gemm.router import launch_router

from ..inputs import bf16

TRUNCATED = [0, 1, 2]
"""Bits beyond the 24 of the largest addend that a tensor core may keep: measured ones of Hopper's are 2."""


def weights(n: int, k: int, device: str) -> torch.Tensor:
    """Random float32 that keep the variance of their inputs, with all of their bits."""
    return torch.randn((n, k), device=device) * k**-0.5


def least_exact(n: int, k: int, device: str) -> torch.Tensor:
    """Random float32 of magnitudes from 2^-110 to 2^-109, with all of their bits."""
    magnitude = (torch.rand((n, k), device=device) + 1) * 2.0**-110
    return torch.where(torch.rand((n, k), device=device) < 0.5, magnitude, -magnitude)


def make(m: int, n: int, k: int, *, sliced: bool = False, new: bool = False) -> Make:
    """Arguments of router_gemm_nt; d is given, with sevens in it, unless it is new."""

    def build(device: str) -> dict[str, Any]:
        x, weight = bf16(m, k + 8 * sliced, device=device)[:, :k], weights(n, k + 4 * sliced, device)[:, :k]
        d = None if new else torch.full((m, n + 4 * sliced), 7.0, device=device)[:, :n]
        return {"x": x, "weight": weight, "d": d}

    return build


def assert_close(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless calc_diff is below 1e-13: with weights of 16 bits it is 1e-11."""
    for got, want in zip(tensors(actual), tensors(expected), strict=True):
        assert_same_metadata(got, want, "d")
        diff = calc_diff(got, want)
        assert diff < 1e-13, f"d: expected a difference below 1e-13, got {diff:.3g}"


SPEC = OpSpec(
    op=tk_gemm.router_gemm_nt,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        Case("m3-n136-k192", make(3, 136, 192), small=True, modes=True),
        Case("m0-n8-k64", make(0, 8, 64), small=True),
        Case("m1-n8-k64", make(1, 8, 64), small=True),
        Case("m9-n24-k320-sliced", make(9, 24, 320, sliced=True), small=True),
        Case("m5-n16-k576-new", make(5, 16, 576, new=True), small=True, modes=True),
        Case("m130-n72-k128", make(130, 72, 128), small=True),
        *(
            Case(f"m{m}-n{n}-k{k}", make(m, n, k), compile=m in (1, 300, 520, 2000))
            for m, n, k in (
                *((1, 256, 7168), (64, 256, 7168), (300, 256, 7168), (520, 256, 7168), (2000, 256, 7168)),
                *((4000, 256, 7168), (8200, 256, 7168), (700, 160, 4096), (8000, 64, 2048), (77, 512, 4160)),
            )
        ),
        *(bench_case(f"m{m}-n256-k7168", make(m, 256, 7168)) for m in (1, 8, 64, 512, 4096, 8192)),
    ),
)


test_tiers = tiers.tests(SPEC)


def split(weight: torch.Tensor) -> list[torch.Tensor]:
    """Three parts of 8 bits, as the kernel cuts them."""
    parts = []
    for _ in range(2):
        parts.append((weight.view(torch.int32) & -0x10000).view(torch.float32))
        weight = weight - parts[-1]
    return [*parts, weight]


def tensor_core(sums: torch.Tensor, products: torch.Tensor, extra_bits: int) -> torch.Tensor:
    """sums (…) + products (…, 16), in float64: addends and their sum are cut off, not rounded.

    `extra_bits`: how many are kept of addends beyond the 24 of the largest.
    """
    addends = torch.cat([products, sums[..., None]], -1)
    unit = torch.frexp(addends.abs().amax(-1)).exponent - 24 - extra_bits
    total = torch.ldexp(torch.trunc(torch.ldexp(addends, -unit[..., None])).sum(-1), unit)
    mantissa, exponent = torch.frexp(total)
    return torch.ldexp(torch.trunc(torch.ldexp(mantissa, torch.tensor(24))), exponent - 24)


def emulated(x: torch.Tensor, weight: torch.Tensor, extra_bits: int) -> torch.Tensor:
    """The kernel's sums in its order, with a tensor core that cuts bits off."""
    num_runs, (num_chunks, num_groups) = x.shape[1] // RUN, Cut.of(x.shape[1])
    rows = x.double().unflatten(1, (num_runs, RUN // 16, 16))
    runs = torch.zeros(x.shape[0], weight.shape[0], num_runs, dtype=torch.float64)
    for part in reversed(split(weight)):
        columns = part.double().unflatten(1, (num_runs, RUN // 16, 16))
        for i in range(RUN // 16):
            runs = tensor_core(runs, rows[:, None, :, i] * columns[None, :, :, i], extra_bits)

    def added(addends: tuple[torch.Tensor, ...], num_sums: int) -> tuple[torch.Tensor, ...]:
        ends = [i * len(addends) // num_sums for i in range(num_sums + 1)]
        return tuple(sum(addends[a:b]) for a, b in pairwise(ends))  # sum() begins with 0, which changes -0 alone.

    return sum(added(added(runs.float().unbind(2), num_chunks), num_groups))


def rms_error(scores: torch.Tensor, exact: torch.Tensor) -> float:
    return float((scores.double() - exact).square().mean().sqrt())


def inputs(kind: str, m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight: "normal", with "outliers" in a hundredth of the channels, or "positive"."""
    x, weight = torch.randn((m, k), device=device), weights(n, k, device)
    if kind == "outliers":
        x = x * torch.where(torch.rand(k, device=device) < 0.01, 30.0, 1.0)
    return (x.abs().bfloat16(), weight.abs()) if kind == "positive" else (x.bfloat16(), weight)


@pytest.mark.parametrize("extra_bits", TRUNCATED)
@pytest.mark.parametrize(("kind", "allowed"), [("normal", 0.6), ("outliers", 0.7), ("positive", 1.5)])
def test_order_of_sums_makes_up_for_bits_cut_off(kind: str, allowed: float, extra_bits: int) -> None:
    """Beside torch's float32 product on a CPU, which sums in blocks: on a GPU it goes through K, and is less exact."""
    torch.manual_seed(0)
    x, weight = inputs(kind, 16, 16, 7168, "cpu")
    exact = x.double() @ weight.double().t()
    assert rms_error(emulated(x, weight, extra_bits), exact) < allowed * rms_error(x.float() @ weight.t(), exact)


def test_parts_are_exact_in_bfloat16() -> None:
    """From 2^-110 on, where the last bit is 2^-133, bfloat16's least number; but not below."""
    others = torch.tensor([3.4028235e38, -3.4e38, 0.0, -1.5])
    weight = torch.cat([torch.randn(1 << 16), least_exact(1 << 16, 1, "cpu").flatten(), others])
    parts = split(weight)
    assert_equal([part.bfloat16().float() for part in parts], parts)
    assert_equal(sum(part.double() for part in parts), weight.double())
    parts = split(least_exact(1 << 16, 1, "cpu") / 2)
    assert not torch.equal(parts[2].bfloat16().float(), parts[2])


def test_by_hand(device: str) -> None:
    """Row m of x is 1 in channel 65 m alone: scores are column 65 m of the weights, to the last bit.

    Eight experts have the least weights that are exact: their low parts are subnormal, and must not become zero.
    """
    weight = torch.cat([weights(40, 640, device), least_exact(8, 640, device), weights(8, 640, device) * 1e38])
    channels = torch.arange(9, device=device) * 65
    x = torch.nn.functional.one_hot(channels, 640).bfloat16()
    assert_equal(tk_gemm.router_gemm_nt(x, weight), weight[:, channels].t().contiguous())


def test_not_finite(device: str) -> None:
    """An infinite or NaN weight reaches its expert's scores and no others; so does a NaN in x its token's."""
    x, weight = bf16(20, 640, device=device), weights(16, 640, device)
    expected = tk_gemm.router_gemm_nt(x, weight)
    weight[3, 70], weight[5, 200], weight[8, 639] = torch.inf, -torch.inf, torch.nan
    weight.view(torch.int32)[9, 1] = 0x7F800001  # A NaN whose upper half is that of an infinity.
    expected[:, 3], expected[:, 5], expected[:, 8:10] = (
        x[:, 70].float() * torch.inf,
        x[:, 200].float() * -torch.inf,
        torch.nan,
    )
    x[7, 100] = torch.nan
    expected[7] = torch.nan
    torch.testing.assert_close(tk_gemm.router_gemm_nt(x, weight), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k", [64, 192, 2048, 4096, 7168, 7232, 16384])
def test_cut(k: int) -> None:
    """No chunk has more than eight runs, none is empty, nor a group."""
    num_runs, (num_chunks, num_groups) = k // RUN, Cut.of(k)
    sizes = [b - a for a, b in pairwise(i * num_runs // num_chunks for i in range(num_chunks + 1))]
    assert sum(sizes) == num_runs
    assert 1 <= min(sizes) <= max(sizes) <= 8
    assert 1 <= num_groups <= min(num_chunks, 4)


@pytest.mark.parametrize("arch", ["sm_89", "sm_100a", "sm_120a"])
def test_other_architectures_are_refused(arch: str) -> None:
    with capture(arch_from_name(arch)), pytest.raises(UnsupportedArchError, match=f"found {arch}"):
        tk_gemm.router_gemm_nt(**make(3, 16, 128)("meta"))


GOOD = make(3, 16, 128)("cpu")


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"x": GOOD["x"][:, :96]}, ValueError, "^x"),
        ({"x": bf16(3, 132, device="cpu")[:, :128]}, ValueError, "^x"),
        ({"x": bf16(3 * 128 + 1, device="cpu")[1:].view(3, 128)}, ValueError, "^x"),
        ({"weight": GOOD["weight"][:12]}, ValueError, "^weight"),
        ({"weight": GOOD["weight"][:, :64]}, ValueError, "^weight"),
        ({"weight": torch.empty(16, 130)[:, :128]}, ValueError, "^weight"),
        ({"d": torch.empty(3, 8)}, ValueError, "^d"),
        ({"d": torch.empty(3, 18)[:, :16]}, ValueError, "^d"),
    ],
)


# ---- on a GPU

PLANS = [
    Plan(RouterConfig(block_experts, block_tokens, output), num_workers)
    for block_experts, block_tokens in ((128, 128), (128, 64), (128, 8), (64, 128), (64, 32), (64, 16))
    for output, num_workers in (
        ("groups", 4),
        ("groups", 2),
        ("groups", 1),
        ("chunks", 16),
        ("chunks", 5),
    )
]


@pytest.mark.gpu
def test_plans_have_equal_bits() -> None:
    x, weight = bf16(300, 7168, device="cuda"), weights(264, 7168, "cuda")
    expected = tk_gemm.router_gemm_nt(x, weight)
    for plan in PLANS:
        d = torch.full((300, 264), 7.0, device="cuda")
        launch_router(x, weight, d, plan)
        assert_equal(d, expected, name=str(plan))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(256, 7168), (64, 2048), (160, 4096), (384, 2048), (8, 64)])
def test_a_token_has_the_same_bits_in_any_batch(n: int, k: int) -> None:
    x, weight = bf16(8192, k, device="cuda"), weights(n, k, "cuda")
    expected = tk_gemm.router_gemm_nt(x, weight)
    for m in (1, 2, 8, 9, 31, 64, 65, 128, 200, 512, 1000, 2048, 4096, 5000):
        assert_equal(tk_gemm.router_gemm_nt(x[-m:], weight), expected[-m:], name=f"M {m}")
    for count in (1, 20, 100):
        with num_sms(count):
            assert_equal(tk_gemm.router_gemm_nt(x[:700], weight), expected[:700], name=f"{count} SMs")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "m", "allowed"),
    [
        *((kind, m, 0.7) for kind in ("normal", "outliers") for m in (1, 64, 4096)),
        # For one token torch adds up in many short sums. What the tensor core cuts off adds up, where all is positive.
        *(("positive", 1, 2), ("positive", 64, 1), ("positive", 4096, 0.4)),
    ],
)
def test_as_exact_as_a_float32_product(kind: str, m: int, allowed: float) -> None:
    torch.manual_seed(0)
    assert not torch.backends.cuda.matmul.allow_tf32
    x, weight = inputs(kind, max(m, 64), 256, 7168, "cuda")
    exact = x.double() @ weight.double().t()
    ours = torch.cat([tk_gemm.router_gemm_nt(rows, weight) for rows in x.split(m)])
    torchs = torch.cat([rows.float() @ weight.t() for rows in x.split(m)])
    assert rms_error(ours, exact) <= allowed * rms_error(torchs, exact)


@pytest.mark.gpu
def test_the_best_experts_are_those_of_an_exact_product() -> None:
    """For every token whose last expert that is chosen is clearly better than the next."""
    torch.manual_seed(0)
    x, weight = inputs("outliers", 4096, 256, 7168, "cuda")
    x = torch.nn.functional.rms_norm(x, (7168,))  # As in examples/moe_layer.py, whose weights have few bits, too.
    weight = weight.bfloat16().float()
    exact = (x.double() @ weight.double().t()).sigmoid()
    best = exact.topk(9)
    is_clear = best.values[:, 7] - best.values[:, 8] > 1e-6
    assert is_clear.float().mean() > 0.99
    chosen = tk_gemm.router_gemm_nt(x, weight).sigmoid().topk(8).indices
    assert_equal(chosen[is_clear].sort().values, best.indices[is_clear, :8].sort().values)


@pytest.mark.gpu
def test_many_runs_have_equal_bits() -> None:
    for m in (1, 64, 4096):
        x, weight = bf16(m, 7168, device="cuda"), weights(256, 7168, "cuda")
        expected = tk_gemm.router_gemm_nt(x, weight)
        for _ in range(200):
            assert torch.equal(tk_gemm.router_gemm_nt(x, weight), expected)
