"""k_grouped_fp8_gemm_nt_contiguous."""

from itertools import accumulate
from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import env
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.math import align
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff

from ..compare import assert_close
from ..inputs import e4m3, packed_factors, psum


def make(
    ks: tuple[int, ...],
    m: int,
    n: int,
    *,
    flat: bool = False,
    with_psum: bool = False,
    with_c: bool = False,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    added: bool = False,
) -> Make:
    """Arguments for groups of these sizes along K; with_psum, of these counts, each padded to 128 with zeros.

    With c, or `added` to what is in d.
    """

    def build(device: str) -> dict[str, Any]:
        sizes = [align(size, 128) for size in ks]
        total = sum(sizes)

        def operand(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            sf = torch.rand((total // 128, num_rows), device=device) + 0.5
            if packed:
                sf = packed_factors(num_rows, total // 128, device=device).t()
            data = e4m3(num_rows, total, device=device)
            first, parts = 0, []
            for size, count in zip(sizes, ks):
                data.view(torch.uint8)[:, first + count : first + size] = 0
                parts.append(data.view(torch.uint8)[:, first : first + size].flatten())
                first += size
            return (torch.cat(parts).view(data.dtype), sf.t()) if flat else (data, sf)

        shape = (len(ks), m, n)
        d = torch.full(shape, 7.0, dtype=dtype, device=device)
        return {
            "a": operand(m),
            "b": operand(n),
            "d": d,
            "ks": psum(ks, device) if with_psum else sizes,
            "c": d if added else torch.randn(shape, device=device).to(dtype) if with_c else None,
        }

    return build


LARGE = (4096, 0, 128, 4864)

SPEC = OpSpec(
    op=tk_gemm.k_grouped_fp8_gemm_nt_contiguous,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        Case("g3-m16-n32", make((128, 0, 256), 16, 32), small=True, modes=True),
        Case("g3-m16-n32-c", make((128, 0, 256), 16, 32, with_c=True), small=True, modes=True),
        Case("g3-m16-n32-bfloat16", make((128, 0, 256), 16, 32, dtype=torch.bfloat16), small=True),
        Case("g3-m16-n32-bfloat16-c", make((128, 0, 256), 16, 32, dtype=torch.bfloat16, with_c=True), small=True),
        Case("g3-m16-n32-flat", make((128, 0, 256), 16, 32, flat=True), small=True, modes=True),
        Case("g5-m16-n32-psum", make((0, 1, 127, 128, 129), 16, 32, with_psum=True), small=True, modes=True),
        Case("g5-m16-n32-flat-psum", make((0, 1, 127, 128, 129), 16, 32, flat=True, with_psum=True), small=True),
        Case("g1-m16-n16-no-k", make((0,), 16, 16), small=True),
        Case("g2-m16-n16-no-k-c", make((0, 0), 16, 16, with_c=True), small=True),
        *(
            Case(f"{name}-packed", build, small=True, compile=name != "g3-m16-n32", archs=("sm_100a",), gpu=False)
            for name, build in (
                ("g3-m16-n32", make((128, 0, 768), 16, 32, packed=True)),
                ("g5-m16-n32-psum-c", make((0, 1, 127, 700, 129), 16, 32, with_psum=True, with_c=True, packed=True)),
                ("g3-m16-n32-flat", make((128, 0, 768), 16, 32, flat=True, dtype=torch.bfloat16, packed=True)),
            )
        ),
        Case("g4-m272-n400", make((1024, 128, 0, 4096), 272, 400, flat=True), compile=True),
        Case("g4-m272-n400-c", make((1024, 128, 0, 4096), 272, 400, with_c=True), compile=True),
        Case("g4-m272-n400-bfloat16", make((1024, 128, 0, 4096), 272, 400, dtype=torch.bfloat16)),
        Case(
            "g4-m144-n2064-bfloat16-c",
            make((1024, 128, 0, 4096), 144, 2064, dtype=torch.bfloat16, with_c=True),
            compile=True,
        ),
        # Three rounds of tiles on 132 SMs, which rows and columns do not fill.
        *(
            Case(f"g4-m2800-n2288-flat{name}", make(LARGE, 2800, 2288, flat=True, **options), modes=not name)
            for name, options in (
                ("", {}),
                ("-bfloat16-c", {"dtype": torch.bfloat16, "with_c": True}),
                ("-added", {"added": True}),
            )
        ),
        Case("g64-m256-n512-psum", make((200, 0, 3, 128) * 16, 256, 512, with_psum=True)),
        bench_case("g4-m4096-n7168-k8192", make((8192,) * 4, 4096, 7168)),
        bench_case("g4-m4096-n7168-k8192-flat", make((8192,) * 4, 4096, 7168, flat=True)),
        bench_case("g32-m7168-n2048-k1024", make((1024,) * 32, 7168, 2048)),
        bench_case("g32-m7168-n2048-k1024-added", make((1024,) * 32, 7168, 2048, added=True)),
        bench_case("g32-m7168-n2048-k1024-added-flat", make((1024,) * 32, 7168, 2048, added=True, flat=True)),
    ),
)


test_tiers = tiers.tests(SPEC)

KS = [128, 0, 256]
ENDS = torch.tensor([128, 128, 384], dtype=torch.int32)
A = (e4m3(16, 384, device="cpu"), torch.rand(3, 16) + 0.5)
B = (e4m3(32, 384, device="cpu"), torch.rand(3, 32) + 0.5)


def test_both_forms_against_a_float64_product() -> None:
    d = tk_gemm.k_grouped_fp8_gemm_nt_contiguous(A, B, None, KS)
    a, b = (x.double() * sf.t().double().repeat_interleave(128, 1) for x, sf in (A, B))
    for group, channels in enumerate((slice(0, 128), slice(0, 0), slice(128, 384))):
        assert calc_diff(d[group], a[:, channels] @ b[:, channels].T) < 1e-7
    assert_equal(tk_gemm.k_grouped_fp8_gemm_nt_contiguous(A, B, None, ENDS), d)
    flat = []
    for data, sf in (A, B):
        parts = [data[:, :128].reshape(-1), data[:, 128:].reshape(-1)]
        flat.append((torch.cat([x.view(torch.uint8) for x in parts]).view(data.dtype), sf.t()))
    assert_equal(tk_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, None, KS), d)


@pytest.mark.parametrize("flat", [False, True])
def test_packed_factors_are_those_of_all_of_k(flat: bool) -> None:
    """A group may begin at any byte of a word."""
    packed = make((128, 0, 768, 640), 16, 32, flat=flat, packed=True)("cpu")
    plain = dict(packed)
    for name in ("a", "b"):
        data, words = packed[name]
        rows = words if flat else words.t()
        sf = unpack_scales(rows, rows.shape[0], 12)
        plain[name] = (data, sf.t().contiguous().t() if flat else sf.t().contiguous())
    results = [tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**{**x, "d": None}) for x in (packed, plain)]
    assert_equal(*results)
    assert all(group.any() for group in results[0][[0, 2, 3]])


@pytest.mark.parametrize(("arch", "packed"), [("sm_90a", True), ("sm_100a", False), ("sm_120a", True)])
def test_factors_of_another_architecture_are_named_before_anything_is_copied(arch: str, packed: bool) -> None:
    arguments = make((128, 0, 256), 16, 32, flat=True, packed=packed)("meta")
    kind = "packed UE8M0" if packed else "float32"
    with capture(arch_from_name(arch)) as launched, pytest.raises(UnsupportedArchError, match=f"{arch} and {kind}"):
        tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments)
    assert not launched


@pytest.mark.parametrize(("arch", "product"), [("sm_90a", "fp8_product"), ("sm_100a", "fp8_product_blackwell")])
@pytest.mark.parametrize("in_a_list", [False, True])
def test_flat_groups_are_not_copied(arch: str, product: str, in_a_list: bool) -> None:
    packed = arch == "sm_100a"
    arguments = make((128, 0, 256), 16, 32, flat=True, with_psum=not in_a_list, packed=packed)("meta")
    with capture(arch_from_name(arch)) as launched:
        tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments)
    names = {request.kernel.name.rpartition(".")[2] for request in launched}
    assert names == {"group_maps_kernel", f"{product}_kernel"}


def both_forms(ks: tuple[int, ...], m: int, n: int, **options: Any) -> list[dict[str, Any]]:
    """Arguments on a GPU: flat ones with sizes in a list, the same with ends in a tensor, and 2-D ones."""
    flat = make(ks, m, n, flat=True, **options)("cuda")
    matrices = dict(flat)
    for name in ("a", "b"):
        data, sf = flat[name]
        parts = data.view(torch.uint8).split([sf.shape[0] * size for size in ks])
        matrix = torch.cat([part.view(sf.shape[0], -1) for part in parts if part.numel()], 1)
        matrices[name] = matrix.view(data.dtype), sf.t()
    ends = torch.tensor(list(accumulate(ks)), dtype=torch.int32, device="cuda")
    return [flat, flat | {"ks": ends}, matrices]


def product_of(arguments: dict[str, Any]) -> torch.Tensor:
    """The op's result in a copy of d, which c remains if it was."""
    d = arguments["d"].clone()
    c = d if arguments["c"] is arguments["d"] else arguments["c"]
    return tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments | {"d": d, "c": c})


ODD = (384, 0, 128, 1664, 0, 0, 640)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"added": True}, {"with_c": True}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "added": True}],
    ids=["float32", "float32-added", "float32-c", "bfloat16", "bfloat16-added"],
)
@pytest.mark.parametrize(("ks", "m", "n"), [(ODD, 272, 400), (ODD, 16, 32), ((0, 256), 128, 528), (LARGE, 2800, 2288)])
def test_forms_have_equal_bits(ks: tuple[int, ...], m: int, n: int, options: dict[str, Any]) -> None:
    in_list, in_tensor, matrices = both_forms(ks, m, n, **options)
    expected = product_of(matrices)
    for _ in range(20):
        assert_equal(product_of(in_list), expected)
    assert_equal(product_of(in_tensor), expected)


@pytest.mark.gpu
def test_nothing_of_other_groups_is_multiplied() -> None:
    """Codes of NaN around each group, times a zero factor too, would show where they do not belong."""
    num_groups, m, n = len(ODD), 272, 400
    for group, size in enumerate(ODD):
        flat, _, _ = both_forms(ODD, m, n)
        for name, num_rows in (("a", m), ("b", n)):
            codes = flat[name][0].view(torch.uint8)
            first = num_rows * sum(ODD[:group])
            codes[:first] = 0x7F
            codes[first + num_rows * size :] = 0x7F
        d = product_of(flat)
        assert d[group].isfinite().all()
        assert d[group].any() == (size > 0)
        others = [x for x in range(num_groups) if x != group and ODD[x]]
        assert d[others].isnan().all()


@pytest.mark.gpu
def test_a_graph_makes_its_maps_anew() -> None:
    """Replayed with other ends in the same tensor, of groups that lie elsewhere in the same data."""
    m, n, total = 272, 400, 2816
    flat, _, _ = both_forms((total,), m, n)
    ends, d = torch.tensor([128, 128, total], dtype=torch.int32, device="cuda"), torch.zeros((3, m, n), device="cuda")
    arguments = flat | {"ks": ends, "d": d, "c": None}
    tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments)
    for sizes in ([128, 0, 2688], [0, 1408, 1408], [1280, 1280, 256], [0, 0, 2816]):
        ends.copy_(torch.tensor(list(accumulate(sizes)), dtype=torch.int32))
        d.fill_(7.0)
        graph.replay()
        assert_equal(d, tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments | {"ks": sizes, "d": None}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_float32_c_that_is_d_is_added_in_memory(dtype: torch.dtype) -> None:
    """On the meta device too, where neither has an address: plans and records are of the kernels that a GPU runs."""
    arguments = make((128, 256), 16, 32, dtype=dtype)("meta")
    addends = []
    for c in (None, torch.empty_like(arguments["d"]), arguments["d"]):
        with capture(arch_from_name("sm_90a")) as launched:
            tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments | {"c": c})
        addends.append(launched[0].args[-2])
    assert addends == [None, "c", "d" if dtype == torch.float32 else "c"]


def test_c_may_be_d_and_groups_of_no_channels_keep_it() -> None:
    c = torch.randn(3, 16, 32)
    product = tk_gemm.k_grouped_fp8_gemm_nt_contiguous(A, B, None, KS)
    expected = product + c
    before = c.clone()
    assert tk_gemm.k_grouped_fp8_gemm_nt_contiguous(A, B, c, KS, c=c) is c
    assert_equal(c, expected)
    assert_equal(c[1], before[1])
    assert not product[1].any()


def test_debug_mode_looks_at_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    ends = torch.tensor([128, 100, 384], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^ks\[1\]: expected at least 128"):
        tk_gemm.k_grouped_fp8_gemm_nt_contiguous(A, B, None, ends)
    sizes = torch.tensor([128, 128, 128], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^grouped_layout: expected the sizes of ks"):
        tk_gemm.k_grouped_fp8_gemm_nt_contiguous(A, B, None, KS, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("flat", [False, True])
def test_bits_are_those_of_the_dense_product(flat: bool) -> None:
    m, n, ks = 144, 272, (256, 0, 128, 1024)
    arguments = make(ks, m, n)("cuda")
    (a, a_sf), (b, b_sf) = arguments["a"], arguments["b"]
    if flat:
        ranges = [slice(sum(ks[:group]), sum(ks[: group + 1])) for group in range(len(ks))]
        parts = [[x.view(torch.uint8)[:, each].flatten() for each in ranges] for x in (a, b)]
        arguments["a"], arguments["b"] = (
            (torch.cat(part).view(a.dtype), sf.t()) for part, sf in zip(parts, (a_sf, b_sf))
        )
    d = tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments)
    first = 0
    for group, size in enumerate(ks):
        blocks, channels = slice(first // 128, (first + size) // 128), slice(first, first + size)
        if size:
            dense = ((a[:, channels], a_sf[blocks].t()), (b[:, channels], b_sf[blocks].t()))
            assert_equal(d[group], tk_gemm.fp8_gemm_nt(*dense, recipe=(1, 1, 128)), name=f"group {group}")
        else:
            assert not d[group].any()
        first += size


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": None, "ks": KS},
    [
        ({"a": A[0]}, TypeError, "^a"),
        ({"a": (A[0], A[1][:2])}, ValueError, r"^a\[1\]"),
        ({"a": (A[0], A[1].int())}, ValueError, r"^a\[1\]"),
        ({"a": (A[0], A[1][:1].int())}, TypeError, r"^b\[1\]"),
        ({"b": (B[0][:, :256], B[1][:2])}, ValueError, "^b"),
        ({"ks": [128, 0, 128]}, ValueError, "^ks"),
        ({"ks": [64, 64, 256]}, ValueError, r"^ks\[0\]"),
        ({"ks": [-128, 256, 256]}, ValueError, r"^ks\[0\]"),
        ({"ks": []}, ValueError, "^ks: .*one group"),
        ({"ks": torch.empty(0, dtype=torch.int32)}, ValueError, "^ks: .*one group"),
        ({"ks": ENDS, "grouped_layout": ENDS}, ValueError, "^grouped_layout: .*None"),
        ({"ks": 384}, TypeError, "^ks"),
        ({"ks": torch.tensor([128, 128, 384])}, TypeError, "^ks"),
        ({"grouped_layout": torch.zeros(2, dtype=torch.int32)}, ValueError, "^grouped_layout"),
        ({"d": torch.empty(2, 16, 32)}, ValueError, "^d"),
        ({"recipe": (1, 128, 128)}, ValueError, "^recipe"),
        ({"recipe": None}, TypeError, "^recipe"),
        ({"a": (A[0].flatten().view(torch.int8), A[1].t())}, TypeError, r"^a\[0\]"),
        ({"a": (A[0].flatten()[:-128], A[1].t())}, ValueError, r"^a\[0\]"),
        ({"a": (A[0].flatten(), A[1].t())}, ValueError, r"^b\[0\]"),
    ],
)
