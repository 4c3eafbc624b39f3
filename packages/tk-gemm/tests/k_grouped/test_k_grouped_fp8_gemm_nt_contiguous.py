"""k_grouped_fp8_gemm_nt_contiguous."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import env
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture, recorded_launches
from tk_core.math import align
from tk_core.num_sms import num_sms
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm import check, launch
from tk_gemm.hopper.tiles import BY_K
from tk_gemm.reference.products import finish, fp8_product
from tk_gemm.tma import takes_tma

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
        # Groups launched one by one, on 132 SMs in three full rounds of tiles, which rows and columns do not fill.
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


def launches(arch: str = "sm_90a", **changes: Any) -> list[str]:
    """Kernels of the launches for flat groups of LARGE sizes, with other arguments of `make`, or ks."""
    ks = changes.pop("ks", None)
    arguments = make(**{"ks": LARGE, "m": 2800, "n": 2288, "flat": True, **changes})("meta")
    with capture(arch_from_name(arch)), recorded_launches() as recorded:
        tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**arguments | ({} if ks is None else {"ks": ks}))
    return [request.kernel.name.rpartition(".")[2] for request, _ in recorded.launches]


def test_large_flat_groups_with_sizes_in_a_list_are_not_copied() -> None:
    by_group, copies = ["fp8_product_kernel"] * 3, ["gather_groups_kernel"] * 2
    assert launches() == by_group
    with num_sms(99):  # Four full rounds of tiles.
        assert launches() == by_group
    with num_sms(131):  # A fourth round of three tiles.
        assert launches() == [*copies, "fp8_product_kernel"]
    ends = torch.empty(len(LARGE), dtype=torch.int32, device="meta")
    assert launches(ks=ends) == [*copies, "fp8_product_kernel"]
    assert launches(m=144, n=272) == [*copies, "fp8_product_kernel"]  # The host would take longer than the GPU.
    assert launches("sm_100a", packed=True) == [*copies, "fp8_product_blackwell_kernel"]


@pytest.mark.parametrize("adds", ["nothing", "c", "d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ks", [(128, 0, 640, 256), (0, 384), (128,), (256, 0)])
def test_views_of_flat_groups(
    monkeypatch: pytest.MonkeyPatch, ks: tuple[int, ...], dtype: torch.dtype, adds: str
) -> None:
    """What is launched for each group, multiplied by the reference of one product, is the op's result."""
    m, n = 48, 272
    arguments = make(ks, m, n, flat=True, dtype=dtype)("cpu")
    d, c = (torch.randn(len(ks), m + 8, n + 16).to(dtype)[:, :m, :n] for _ in range(2))
    c = {"nothing": None, "c": c, "d": d}[adds]
    copies = [None if x is None else x.clone() for x in (c, d)]
    expected = tk_gemm.reference.k_grouped_fp8_gemm_nt_contiguous(**arguments | {"c": copies[0], "d": copies[1]})
    num_launches = 0

    def kernel(*args: Any) -> Callable[..., None]:
        assert args[:4] == ("k", BY_K, dtype, True)

        def product(*args: Any) -> None:
            nonlocal num_launches
            a, a_sf, b, b_sf, end, c, d, num_blocks = args
            assert all(x.ndim == 3 and x.shape[0] == 1 and takes_tma(x) for x in (a, a_sf, b, b_sf, d))
            assert end.shape == (1,)
            assert int(end) >= a.shape[2] > 0
            assert num_blocks == 3
            num_launches += 1
            finish(fp8_product(a[0], a_sf[0].t(), b[0], b_sf[0].t()), d[0], None if c is None else c[0])

        return product

    monkeypatch.setattr(launch, "fp8_product_kernel", kernel)
    monkeypatch.setattr(launch, "get_arch", lambda _: arch_from_name("sm_90a"))
    monkeypatch.setattr(launch, "get_num_sms", lambda _: 132)
    x, _ = check.fp8_k_operands(arguments["a"], arguments["b"])
    launch.launch_fp8_by_group("op", x, list(ks), c, d)
    assert num_launches == len([size for size in ks if size])
    assert_equal(d.contiguous(), expected.contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
def test_forms_of_large_groups_agree(added: bool) -> None:
    """In bits: flat groups with sizes in a list, launched one by one, with ends on the device, copied, and 2-D ones."""
    arguments = make(LARGE, 2800, 2288, flat=True, added=added)("cuda")
    plain, ends = dict(arguments), torch.tensor(list(accumulate(LARGE)), dtype=torch.int32, device="cuda")
    for name in ("a", "b"):
        data, sf = arguments[name]
        sizes = [sf.shape[0] * size for size in LARGE]
        parts = [part.view(torch.uint8).view(sf.shape[0], -1) for part in data.split(sizes) if part.numel()]
        plain[name] = (torch.cat(parts, 1).view(data.dtype), sf.t())
    results = []
    for each in (arguments, arguments | {"ks": ends}, plain):
        d = arguments["d"].clone()
        results.append(tk_gemm.k_grouped_fp8_gemm_nt_contiguous(**each | {"d": d, "c": d if added else None}))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


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
