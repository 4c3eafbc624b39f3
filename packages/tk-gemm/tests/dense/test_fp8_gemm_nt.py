"""fp8_gemm_nt and its transposed views."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff

from ..compare import assert_close
from ..inputs import activations, dequantized, e4m3, packed_factors, row_factors, weights

SHAPES = (
    (4096, 7168, 16384),
    (4096, 4096, 7168),
    (4096, 24576, 1536),
    (4096, 7168, 2048),
    (4096, 2112, 7168),
    (4096, 32768, 512),
    (8192, 8192, 8192),
    # A batch that is decoded: bound by reading the weights.
    *((m, n, k) for n, k in ((7168, 2048), (4096, 7168), (2112, 7168), (7168, 16384)) for m in (1, 8, 16, 32, 64, 128)),
)


def make(
    m: int,
    n: int,
    k: int,
    *,
    layout: str = "column",
    dtype: torch.dtype = torch.bfloat16,
    with_c: bool = False,
    per_row: bool = False,
) -> Make:
    """Arguments of fp8_gemm_nt; d is given, with sevens in it."""

    def build(device: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "a": activations(m, k, device, layout),
            "b": activations(n, k, device, layout) if per_row else weights(n, k, device, packed=layout == "packed"),
            "d": torch.full((m, n), 7.0, dtype=dtype, device=device),
        }
        if with_c:
            arguments["c"] = torch.randn((m, n), device=device).to(dtype)
        if per_row:
            arguments["recipe"] = (1, 1, 128)
        return arguments

    return build


SPEC = OpSpec(
    op=tk_gemm.fp8_gemm_nt,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        # hopper/test_machine_code.py and blackwell/test_machine_code.py compile most programs.
        Case("m3-n144-k256", make(3, 144, 256), small=True, modes=True),
        Case("m0-n16-k128", make(0, 16, 128), small=True),
        Case("m1-n16-k128", make(1, 16, 128), small=True),
        Case("m3-n144-k256-row-major", make(3, 144, 256, layout="row"), small=True),
        Case("m3-n144-k256-sliced", make(3, 144, 256, layout="sliced"), small=True),
        Case("m5-n32-k384-float32-c", make(5, 32, 384, dtype=torch.float32, with_c=True), small=True, modes=True),
        Case("m5-n32-k384-c", make(5, 32, 384, with_c=True), small=True),
        Case("m3-n16-k128-new", lambda device: {**make(3, 16, 128)(device), "d": None}, small=True, gpu=False),
        Case("m16-n48-k256-per-row", make(16, 48, 256, dtype=torch.float32, per_row=True), small=True),
        Case("m4096-n4096-k256", make(4096, 4096, 256)),
        Case("m2048-n2048-k384-c", make(2048, 2048, 384, with_c=True), compile=True),
        Case("m4096-n4096-k256-float32", make(4096, 4096, 256, dtype=torch.float32)),
        Case("m129-n64-k128", make(129, 64, 128), compile=True),
        Case("m63-n32768-k256", make(63, 32768, 256)),
        Case("m64-n7168-k16384", make(64, 7168, 16384)),
        Case("m1-n2112-k7168-row-major", make(1, 2112, 7168, layout="row")),
        Case("m4096-n2112-k1024-row-major", make(4096, 2112, 1024, layout="row"), compile=True),
        Case("m1000-n272-k7168-sliced", make(1000, 272, 7168, layout="sliced")),
        Case("m300-n528-k7168-float32-c", make(300, 528, 7168, dtype=torch.float32, with_c=True)),
        Case("m129-n400-k16384-per-row", make(129, 400, 16384, dtype=torch.float32, per_row=True)),
        Case(
            "m130-n144-k256-per-row-row-major",
            make(130, 144, 256, dtype=torch.float32, per_row=True, layout="row", with_c=True),
        ),
        Case("m16-n48-k128-per-row-off", make(16, 48, 128, dtype=torch.float32, per_row=True, layout="off")),
        Case("m16-n48-k128-off", make(16, 48, 128, layout="off")),
        *(
            Case(f"{name}-packed", build, small=True, compile="k128" in name, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("m3-n144-k640", make(3, 144, 640, layout="packed")),
                ("m3-n144-k128-float32-c", make(3, 144, 128, dtype=torch.float32, with_c=True, layout="packed")),
                ("m5-n48-k640-per-row", make(5, 48, 640, dtype=torch.float32, per_row=True, layout="packed")),
            )
        ),
        *(bench_case(f"m{m}-n{n}-k{k}", make(m, n, k)) for m, n, k in SHAPES),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_a_float64_product(dtype: torch.dtype, positive: bool) -> None:
    a, b = activations(7, 1024, "cpu", positive=positive), weights(144, 1024, "cpu", positive=positive)
    d = tk_gemm.fp8_gemm_nt(a, b, torch.empty(7, 144, dtype=dtype))
    limit = 3e-6 if dtype is torch.bfloat16 else 1e-6 if positive else 1e-7
    assert calc_diff(d, dequantized(a) @ dequantized(b).T) < limit


def test_by_hand() -> None:
    """Row 0 of a is 1 in channel 0 and 2 in channel 128; factors 3 and 5 of a, and 7, 11 or 13, 17 of b's blocks."""
    data = torch.zeros(2, 256)
    data[0, 0], data[0, 128] = 1, 2
    b_sf = torch.tensor([[7.0, 11.0], [13.0, 17.0]])
    a = (data.to(torch.float8_e4m3fn), torch.tensor([[3.0, 5.0], [1.0, 1.0]]))
    b = (torch.ones(144, 256).to(torch.float8_e4m3fn), b_sf)
    d = tk_gemm.fp8_gemm_nt(a, b, torch.empty(2, 144))
    assert d[0].tolist() == [3.0 * 7 + 2 * 5 * 11] * 128 + [3.0 * 13 + 2 * 5 * 17] * 16
    assert d[1].tolist() == [0.0] * 144


def test_a_row_does_not_depend_on_others() -> None:
    (data, sf), b = activations(9, 512, "cpu"), weights(48, 512, "cpu")
    whole = tk_gemm.fp8_gemm_nt((data, sf), b, torch.empty(9, 48))
    for row in range(9):
        one = tk_gemm.fp8_gemm_nt((data[row : row + 1], sf[row : row + 1].clone()), b, torch.empty(1, 48))
        assert_equal(one[0], whole[row])


def test_c_may_be_d() -> None:
    a, b = activations(3, 128, "cpu"), weights(16, 128, "cpu")
    c = torch.randn(3, 16)
    expected = tk_gemm.fp8_gemm_nt(a, b, c=c)
    assert expected.dtype == torch.float32
    assert tk_gemm.fp8_gemm_nt(a, b, c, c) is c
    assert_equal(c, expected)


@pytest.mark.parametrize("per_row", [False, True])
def test_packed_factors_are_powers_of_two(per_row: bool) -> None:
    a, b = e4m3(5, 640, device="cpu"), e4m3(144, 640, device="cpu")
    a_sf = packed_factors(5, 5, device="cpu")
    b_sf = packed_factors(144 if per_row else 2, 5, device="cpu")
    recipe = (1, 1 if per_row else 128, 128)
    packed = tk_gemm.fp8_gemm_nt((a, a_sf), (b, b_sf), recipe=recipe)
    plain = [unpack_scales(sf, sf.shape[0], 5) for sf in (a_sf, b_sf)]
    assert plain[0].unique().tolist() == [0.25, 0.5, 1, 2, 4]
    assert_equal(packed, tk_gemm.fp8_gemm_nt((a, plain[0]), (b, plain[1]), recipe=recipe))


@pytest.mark.parametrize(("arch", "packed"), [("sm_90a", True), ("sm_100a", False), ("sm_120a", True)])
def test_factors_of_another_architecture(arch: str, packed: bool) -> None:
    arguments = make(3, 144, 256, layout="packed" if packed else "column")("meta")
    kind = "packed UE8M0" if packed else "float32"
    with capture(arch_from_name(arch)), pytest.raises(UnsupportedArchError, match=f"found {arch} and {kind} scale fac"):
        tk_gemm.fp8_gemm_nt(**arguments)


@pytest.mark.parametrize("name", ["nn", "tn", "tt"])
def test_views(name: str) -> None:
    a, b = activations(3, 256, "cpu"), weights(16, 256, "cpu")
    expected = tk_gemm.fp8_gemm_nt(a, b)
    view_a = (a[0].t(), a[1].t()) if name[0] == "t" else a
    view_b = (b[0].t(), b[1].t()) if name[1] == "n" else b
    assert_equal(getattr(tk_gemm, f"fp8_gemm_{name}")(view_a, view_b), expected)
    copied = tuple(x.contiguous() for x in (view_b if name[1] == "n" else view_a))
    args = (view_a, copied) if name[1] == "n" else (copied, view_b)
    with pytest.raises(ValueError, match=r"\[0\]"):
        getattr(tk_gemm, f"fp8_gemm_{name}")(*args)


A, B, D = activations(3, 256, "cpu"), weights(144, 256, "cpu"), torch.zeros(3, 144, dtype=torch.bfloat16)


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": D},
    [
        ({"a": A[0]}, TypeError, "^a"),
        ({"a": (e4m3(3, 192, device="cpu"), A[1])}, ValueError, r"^a\[0\]"),
        ({"a": (A[0].t(), A[1])}, ValueError, r"^a\[0\]"),
        ({"a": (e4m3(3, 264, device="cpu")[:, :256], A[1])}, ValueError, r"^a\[0\]"),
        ({"a": (e4m3(3 * 256 + 1, device="cpu")[1:].view(3, 256), A[1])}, ValueError, r"^a\[0\]"),
        ({"a": (A[0], A[1].int())}, ValueError, r"^a\[1\]"),
        ({"a": (A[0], torch.zeros(3, 2, dtype=torch.int32)[:, :1])}, ValueError, r"^a\[1\]"),
        ({"a": (A[0], packed_factors(3, 2, device="cpu"))}, TypeError, r"^b\[1\]"),
        ({"a": (A[0], row_factors(3, 8, "cpu"))}, ValueError, r"^a\[1\]"),
        ({"a": (A[0], torch.ones(2, 3).t())}, ValueError, r"^a\[1\]"),
        ({"b": (B[0][:, :128], B[1])}, ValueError, r"^b\[0\]"),
        ({"b": (B[0][:136], B[1])}, ValueError, r"^b\[0\]"),
        ({"b": (B[0], B[1][:1])}, ValueError, r"^b\[1\]"),
        ({"recipe": (1, 1, 128), "d": None}, ValueError, r"^b\[1\]"),
        ({"d": D[:2]}, ValueError, "^d"),
        ({"d": A[0].view(torch.bfloat16)[:, :16], "b": weights(16, 256, "cpu")}, ValueError, "^d"),
        ({"c": D.float()}, TypeError, "^c"),
        ({"c": D[:2]}, ValueError, "^c"),
        ({"recipe": (1, 32, 32)}, ValueError, "^recipe"),
        ({"recipe_a": (1, 32)}, ValueError, "^recipe_a"),
        ({"recipe_b": (32, 32)}, ValueError, "^recipe_b"),
        ({"recipe_a": 128}, TypeError, "^recipe_a"),
        ({"recipe": (1.0, 128.0, 128.0)}, TypeError, "^recipe: expected a tuple of int"),
        ({"recipe_b": (True, 128)}, TypeError, "^recipe_b"),
        ({"recipe": (1, 128, 128), "recipe_a": (1, 128)}, ValueError, "^recipe_a"),
        ({"recipe": (1, 128, 128), "recipe_b": (128, 128)}, ValueError, "^recipe_b"),
        ({"compiled_dims": "nope"}, ValueError, "^compiled_dims: expected letters of 'mnk', got 'nope'"),
    ],
)
