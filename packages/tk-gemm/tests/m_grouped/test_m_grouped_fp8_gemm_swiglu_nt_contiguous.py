"""m_grouped_fp8_gemm_swiglu_nt_contiguous."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.reference.scales import unpack_scales
from tk_core.testing import tiers
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.testing.lib.inputs import activations, dequantized, ids, weights
from tk_gemm.testing.m_grouped.m_grouped_fp8_gemm_swiglu_nt_contiguous import SPEC, make

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

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


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": A[0]}),
        (ValueError, r"a\[1\]", {"a": (A[0], A[1][1:].int())}),
        (TypeError, r"b\[1\]", {"b": (B[0], B[1].int())}),
        (ValueError, r"b\[0\]", {"b": weights(384, 128, "cpu", 2)}),
        (ValueError, "grouped_layout", {"grouped_layout": LAYOUT[1:]}),
        (ValueError, "topk_weights", {"pos_to_token_topk": LAYOUT}),
        (ValueError, "pos_to_token_topk", {"topk_weights": torch.ones(3, 1)}),
        (TypeError, "pos_to_token_topk", {"pos_to_token_topk": LAYOUT.long(), "topk_weights": torch.ones(3, 1)}),
        (TypeError, "topk_weights", {"pos_to_token_topk": LAYOUT, "topk_weights": torch.ones(3, 1).double()}),
        (ValueError, "swiglu_clamp_value", {"swiglu_clamp_value": 0.0}),
        (TypeError, "swiglu_clamp_value", {"swiglu_clamp_value": "2"}),
        (TypeError, "use_psum_layout", {"use_psum_layout": None}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(**{"a": A, "b": B, "grouped_layout": LAYOUT, **changes})
