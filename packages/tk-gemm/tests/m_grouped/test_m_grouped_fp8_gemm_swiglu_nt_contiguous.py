"""m_grouped_fp8_gemm_swiglu_nt_contiguous."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff

from ..compare import assert_close_pairs
from ..inputs import activations, dequantized, ids, psum, weights
from .test_m_grouped_fp8_gemm_nt_contiguous import ODD, ODD_ROWS, UNEVEN


def make(
    counts: tuple[int, ...],
    num_rows: int,
    inner: int,
    k: int,
    *,
    layout: str = "column",
    with_psum: bool = False,
    weighted: bool = False,
    clamp: float | None = None,
) -> Make:
    """Arguments for groups of these counts in a buffer of num_rows rows; factors such that gates are about 1."""

    def build(device: str) -> dict[str, Any]:
        packed = layout == "packed"
        a = activations(num_rows, k, device, layout)
        b = weights(2 * inner, k, device, len(counts), packed=packed)
        if packed:  # 2**-18 of the factors: less from each of the four bytes of a word.
            a[1].sub_(12 * 0x01010101)
            b[1].sub_(6 * 0x01010101)
        else:
            a[1].mul_(1e-3 * k**-0.5)
            b[1].mul_(1e-1)
        arguments: dict[str, Any] = {
            "a": a,
            "b": b,
            "grouped_layout": psum(counts, device) if with_psum else ids(counts, num_rows, device),
            "use_psum_layout": with_psum,
            "swiglu_clamp_value": clamp,
        }
        if weighted:
            arguments["pos_to_token_topk"] = torch.arange(num_rows, dtype=torch.int32, device=device) - 1
            arguments["topk_weights"] = torch.rand((max(1, num_rows // 2), 1), device=device)
        return arguments

    return build


SPEC = OpSpec(
    op=tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous,
    compare=assert_close_pairs,
    archs=("sm_90a",),
    cases=(
        Case("g2-i128-k128", make((3, 1), 256, 128, 128), small=True, modes=True),
        Case("g2-i128-k128-weighted", make((3, 1), 256, 128, 128, weighted=True), small=True),
        Case("g2-i128-k128-clamp", make((3, 1), 256, 128, 128, clamp=0.5), small=True),
        Case(
            "g2-i128-k128-psum-weighted-clamp",
            make((3, 1), 256, 128, 128, with_psum=True, weighted=True, clamp=0.5),
            small=True,
            modes=True,
        ),
        Case("g2-i128-k128-row-major", make((3, 1), 256, 128, 128, layout="row"), small=True),
        *(
            Case(f"g2-i{name}-packed", build, small=True, compile="psum" in name, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("640-k640", make((3, 130), 384, 640, 640, layout="packed")),
                ("128-k128-psum-clamp", make((3, 1), 256, 128, 128, layout="packed", with_psum=True, clamp=0.5)),
                ("128-k128-weighted", make((3, 1), 256, 128, 128, layout="packed", weighted=True)),
            )
        ),
        Case("g2-i128-k128-no-rows", make((0, 0), 0, 128, 128), small=True),
        Case("g6-i2048-k512", make(UNEVEN, 4096, 2048, 512)),
        Case("g6-i2048-k512-weighted-clamp", make(UNEVEN, 4096, 2048, 512, weighted=True, clamp=1.0)),
        Case("g6-i256-k7168-psum", make(ODD, ODD_ROWS, 256, 7168, with_psum=True), compile=True),
        Case("g6-i384-k256-row-major-clamp", make(ODD, ODD_ROWS, 384, 256, layout="row", clamp=0.3), compile=True),
        bench_case("g32-m32768-i2048-k7168", make((1024,) * 32, 32768, 2048, 7168)),
    ),
)


test_tiers = tiers.tests(SPEC)

A, LAYOUT = activations(256, 128, "cpu"), ids((3, 1), 256, "cpu")
PLAIN = weights(512, 128, "cpu", 2)
B = tk_gemm.interleave_gate_and_up(PLAIN)


def test_against_float64_swiglu_of_the_plain_weights() -> None:
    """Factors are small, so that the gate is not all 0 and infinity."""
    a, plain = (A[0], A[1] / 1e4), (PLAIN[0], PLAIN[1] / 1e2)
    pos = torch.full((256,), -1, dtype=torch.int32)
    pos[[0, 1, 128]] = torch.tensor([2, 0, 1], dtype=torch.int32)
    topk_weights = torch.tensor([[0.5, 2.0, 4.0]])
    data, sf = tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(
        a, tk_gemm.interleave_gate_and_up(plain), LAYOUT, pos, topk_weights, 2.0
    )
    assert sf.stride() == (1, 256)
    got, factors, exact = dequantized((data, sf)), dequantized(plain), dequantized(a)
    for row, group, weight in ((0, 0, 4.0), (1, 0, 0.5), (128, 1, 2.0)):
        gate, up = (exact[row] @ factors[group].T).chunk(2)
        gate, up = gate.clamp(max=2), up.clamp(-2, 2)
        expected = gate * torch.sigmoid(gate) * up * weight
        assert calc_diff(got[row], expected) < 1e-3
        amax = expected.view(2, 128).abs().amax(1).clamp(min=1e-4)
        torch.testing.assert_close(sf[row].double(), amax / 448, rtol=1e-5, atol=0)
    # Row 2 has a group but no weight; the others have no group.
    padding = torch.ones(256, dtype=torch.bool)
    padding[[0, 1, 128]] = False
    assert not data.view(torch.uint8)[padding].any()
    assert not sf[padding].any()


def test_packed_factors() -> None:
    """The results' factors are those of float32 rounded up to powers of two; 255 without a finite amax."""
    packed = make((3, 130), 384, 640, 640, layout="packed", with_psum=True)("cpu")
    (a, a_words), (b, b_words) = packed["a"], packed["b"]
    a_words[0, 0] = 0x7EFEFE7E  # 2**127 twice: the first row's products are infinite.
    plain = {
        **packed,
        "a": (a, unpack_scales(a_words, 384, 5)),
        "b": (b, torch.stack([unpack_scales(words, 10, 5) for words in b_words])),
    }
    data, words = tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(**packed)
    expected, factors = tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(**plain)
    assert words.stride() == (1, 384)
    sf = unpack_scales(words, 384, 5)
    assert sf[0].isnan().all()
    rows = [1, 2, *range(128, 258)]
    assert_equal(sf[rows], torch.exp2(torch.ceil(torch.log2(factors[rows]))))
    got, want = (
        dequantized((x.view(torch.uint8)[rows].view(x.dtype), y[rows])) for x, y in ((data, sf), (expected, factors))
    )
    assert calc_diff(got, want) < 1e-3
    assert not data.view(torch.uint8)[3:128].any()
    assert not words[3:128].any()


@pytest.mark.parametrize(("arch", "packed"), [("sm_90a", True), ("sm_100a", False), ("sm_120a", True)])
def test_factors_of_another_architecture_are_named(arch: str, packed: bool) -> None:
    arguments = make((3, 1), 256, 128, 128, layout="packed" if packed else "column")("meta")
    kind = "packed UE8M0" if packed else "float32"
    with capture(arch_from_name(arch)) as launched, pytest.raises(UnsupportedArchError, match=f"{arch} and {kind}"):
        tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(**arguments)
    assert not launched


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "grouped_layout": LAYOUT},
    [
        ({"a": A[0]}, TypeError, "^a"),
        ({"a": (A[0], A[1][1:].int())}, ValueError, r"^a\[1\]"),
        ({"b": (B[0], B[1].int())}, TypeError, r"^b\[1\]"),
        ({"b": weights(384, 128, "cpu", 2)}, ValueError, r"^b\[0\]"),
        ({"grouped_layout": LAYOUT[1:]}, ValueError, "^grouped_layout"),
        ({"pos_to_token_topk": LAYOUT}, ValueError, "^topk_weights"),
        ({"topk_weights": torch.ones(3, 1)}, ValueError, "^pos_to_token_topk"),
        ({"swiglu_clamp_value": 0.0}, ValueError, "^swiglu_clamp_value"),
    ],
)
