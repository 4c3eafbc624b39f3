"""engram_lookup."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tk_engram
from tk_core import backend
from tk_core.arch import ARCHS
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.usage import resource_usage
from tk_engram import reference
from tk_engram.lookup.engram_lookup import _engram_lookup_kernel


def make(
    num_tokens: int,
    num_columns: int,
    dim: int,
    num_rows: int,
    *,
    kind: str = "bf16",
    first_element: int = 0,
    row_gap: int = 0,
    negatives: bool = True,
    out: bool = False,
    host: bool = False,
) -> Make:
    """Random indices, with `negatives` about a third of them negative, and a table of `kind`.

    "bf16"; "ue8m0" and "float": e4m3 with scales in a tensor of their own; "packed": e4m3 with the exponents of a row
    after its codes, as in DeepSeek's V4.1. Any code and exponent may come. Rows of bf16 and codes have `row_gap`
    elements between them, the first begins at element `first_element` of its storage. `host` tables of a GPU are in
    pinned memory.
    """

    def build(device: str) -> dict[str, Any]:
        pin = host and torch.device(device).type == "cuda"
        table_device = "cpu" if pin else device

        def rows(width: int, dtype: torch.dtype, *, first: int = 0, gap: int = 0) -> torch.Tensor:
            size = first + num_rows * (width + gap)
            storage = torch.empty(size, dtype=dtype, device=table_device, pin_memory=pin)
            if dtype is torch.uint8:
                storage.random_(0, 256)
            else:
                storage.normal_()
            return storage[first:].view(num_rows, width + gap)[:, :width]

        groups, table_sf = dim // 32, None
        if kind == "bf16":
            table = rows(dim, torch.bfloat16, first=first_element, gap=row_gap)
        elif kind == "packed":
            both = rows(dim + groups, torch.uint8, first=first_element, gap=row_gap)
            table, table_sf = both[:, :dim].view(torch.float8_e4m3fn), both[:, dim:]
        else:
            table = rows(dim, torch.uint8, first=first_element, gap=row_gap).view(torch.float8_e4m3fn)
            table_sf = rows(groups, torch.uint8 if kind == "ue8m0" else torch.float32)
        least = -(num_rows // 2) - 1 if negatives else 0
        shape = (num_tokens, num_columns)
        indices = torch.randint(least, num_rows, shape, dtype=torch.int32, device=device)
        written = None
        if out:
            written = torch.full((*shape, dim), torch.nan, dtype=torch.bfloat16, device=device)
        return {"indices": indices, "table": table, "table_sf": table_sf, "out": written}

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the indices, of each row that is looked up, and of the result."""
    indices, table, table_sf = kwargs["indices"], kwargs["table"], kwargs["table_sf"]
    row = table.shape[1] * table.itemsize + (0 if table_sf is None else table_sf.shape[1] * table_sf.itemsize)
    return 4 * indices.numel() + indices.numel() * (row + 2 * table.shape[1])


def _bench(name: str, *args: Any, model_shape: bool = False, compile: bool = False, **kwargs: Any) -> Case:
    return bench_case(name, make(*args, negatives=False, **kwargs), model_shape=model_shape, compile=compile)


# 8.6 and 8.9 GB.
_BF16_ROWS, _PACKED_ROWS = 1 << 24, 1 << 25

SPEC = OpSpec(
    op=tk_engram.engram_lookup,
    mutates=("out",),
    least_bytes=least_bytes,
    cases=(
        Case("bf16-d64-t3", make(3, 5, 64, 11), small=True, modes=True),
        Case("bf16-d32-t17-out", make(17, 3, 32, 9, out=True), small=True, modes=True),
        Case("bf16-d96-t5-strided", make(5, 7, 96, 9, row_gap=8), small=True),
        Case("bf16-d96-t5-aligned-to-4", make(5, 7, 96, 9, row_gap=2), small=True),
        Case("bf16-d64-t5-unaligned", make(5, 7, 64, 9, first_element=1), small=True),
        Case("bf16-d288-t3", make(3, 5, 288, 9), small=True),
        Case("bf16-d64-t0", make(0, 4, 64, 9), small=True),
        Case("bf16-d64-c0-out", make(4, 0, 64, 9, out=True), small=True),
        Case("ue8m0-d64-t17", make(17, 3, 64, 9, kind="ue8m0"), small=True),
        Case("ue8m0-d32-t3", make(3, 3, 32, 9, kind="ue8m0"), small=True),
        Case("float-d96-t5", make(5, 7, 96, 9, kind="float"), small=True),
        Case("float-d96-t5-aligned-to-2", make(5, 7, 96, 9, kind="float", row_gap=2), small=True, compile=True),
        Case("packed-d256-t3", make(3, 2, 256, 9, kind="packed"), small=True),
        Case("packed-d64-t3-unaligned", make(3, 5, 64, 9, kind="packed", first_element=1), small=True),
        *(Case(f"bf16-d256-t{t}", make(t, 16, 256, 100_003)) for t in (0, 1, 17, 4001, 8001)),
        *(Case(f"packed-d256-t{t}-out", make(t, 16, 256, 100_003, kind="packed", out=True)) for t in (1, 4001)),
        *(Case(f"bf16-d{dim}-t1001", make(1001, 8, dim, 1009)) for dim in (64, 160, 576, 1280, 4096)),
        *(Case(f"float-d{dim}-t1001", make(1001, 8, dim, 1009, kind="float")) for dim in (64, 352, 1280)),
        Case("ue8m0-d512-t1001-strided", make(1001, 8, 512, 1009, kind="ue8m0", row_gap=4)),
        _bench("bf16-d256-t8192", 8192, 16, 256, _BF16_ROWS, model_shape=True, compile=True),
        _bench("packed-d256-t8192", 8192, 16, 256, _PACKED_ROWS, kind="packed", model_shape=True, compile=True),
        _bench("float-d256-t8192", 8192, 16, 256, _PACKED_ROWS, kind="float"),
        _bench("bf16-d64-t8192", 8192, 16, 64, _BF16_ROWS),
        _bench("bf16-d1280-t8192", 8192, 16, 1280, 1 << 22),
        *(_bench(f"bf16-d256-t{t}", t, 16, 256, 1 << 22) for t in (1, 64, 4001, 8001)),
    ),
)


test_tiers = tiers.tests(SPEC)

E4M3 = torch.float8_e4m3fn


def look_up(indices: list[list[int]], table: Tensor, table_sf: Tensor | None, device: str) -> Tensor:
    table_sf = None if table_sf is None else table_sf.to(device)
    rows = torch.tensor(indices, dtype=torch.int32, device=device)
    return tk_engram.engram_lookup(rows, table.to(device), table_sf=table_sf).cpu()


def test_by_hand(device: str) -> None:
    table = torch.tensor([1.0, -2.0, 3.5])[:, None].repeat(1, 32).bfloat16()
    table[2, 31] = 7.0
    out = look_up([[2, 0], [-1, 1], [0, -(2**31)]], table, None, device)
    assert out.shape == (3, 2, 32)
    assert out[..., 0].tolist() == [[3.5, 1.0], [0.0, -2.0], [1.0, 0.0]]
    assert out[..., 31].tolist() == [[7.0, 1.0], [0.0, -2.0], [1.0, 0.0]]
    assert (out[1, 0].view(torch.int16) == 0).all()


def test_scales_by_hand(device: str) -> None:
    # e4m3: sign, four bits of exponent (bias 7), three of mantissa; 0x38 is 1, 0x01 2⁻⁹, 0x7e 448, 0x7f NaN.
    codes = torch.tensor([0x38, 0xB8, 0x7E, 0x01, 0x3B, 0x7F], dtype=torch.uint8)
    table = torch.zeros(3, 64, dtype=torch.uint8)
    table[:, :6], table[:, 32:38] = codes, codes
    exponents = torch.tensor([[127, 128], [0, 254], [1, 255]], dtype=torch.uint8)
    out = look_up([[0], [1], [2]], table.view(E4M3), exponents, device)[:, 0].double()
    values = torch.tensor([1.0, -1.0, 448.0, 2.0**-9, 1.375], dtype=torch.float64)
    assert_equal(out[0, :5], values)
    assert_equal(out[0, 32:37], 2 * values)
    # 2⁻¹³⁶ is below half of bfloat16's least number, 2⁻¹³³; 448 · 2¹²⁷ is beyond its greatest.
    assert out[1, :5].tolist() == [2.0**-127, -(2.0**-127), 448 * 2.0**-127, 0.0, 11 * 2.0**-130]
    assert out[1, 32:37].tolist() == [2.0**127, -(2.0**127), float("inf"), 2.0**118, 1.375 * 2.0**127]
    assert out[2, :3].tolist() == [2.0**-126, -(2.0**-126), 448 * 2.0**-126]
    assert out[:, 5].isnan().all()
    assert out[2, 32:].isnan().all()
    assert not out[0, 6:32].any()


def test_products_are_rounded_to_nearest_even(device: str) -> None:
    # A code of 1 leaves the scale: 257 and 259 are midway between numbers of 8 bits.
    sf = torch.tensor([257.0, 259.0, -257.0, 258.9]).view(2, 2)
    table = torch.full((2, 64), 0x38, dtype=torch.uint8).view(E4M3)
    out = look_up([[0], [1]], table, sf, device)[:, 0]
    assert out[:, 0].tolist() == [256.0, -256.0]
    assert out[:, 32].tolist() == [260.0, 258.0]


@pytest.mark.parametrize("kind", ["bf16", "packed", "float"])
def test_against_torch_embedding(kind: str, device: str) -> None:
    inputs = make(7, 5, 96, 13, kind=kind)(device)
    inputs["indices"][0, 0] = 13 - 1
    table = inputs["table"].float()
    if kind != "bf16":
        sf = inputs["table_sf"]
        scales = sf.view(torch.float8_e8m0fnu).float() if sf.dtype is torch.uint8 else sf
        table = table * scales.repeat_interleave(32, 1)
    # Row 0 stands for negative indices.
    padded = torch.nn.functional.pad(table, (0, 0, 1, 0))
    expected = torch.nn.functional.embedding(inputs["indices"].clamp(min=-1) + 1, padded).bfloat16()
    torch.testing.assert_close(tk_engram.engram_lookup(**inputs), expected, rtol=0, atol=0, equal_nan=True)


def test_an_index_beyond_the_table_counts_as_negative(device: str) -> None:
    inputs = make(4, 3, 32, 9)(device)
    expected = tk_engram.engram_lookup(**inputs)
    rows = inputs["indices"]
    beyond = torch.where(rows < 0, 9 - 1 - rows, rows)
    assert (beyond >= 9).any()
    assert_equal(tk_engram.engram_lookup(**{**inputs, "indices": beyond}), expected)


def test_debug_names_an_index_beyond_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(4, 3, 32, 9)("cpu")
    monkeypatch.setattr("tk_core.env.debug", lambda: True)
    tk_engram.engram_lookup(**inputs)
    inputs["indices"][1, 2] = 9
    with pytest.raises(ValueError, match=r"indices: expected indices below 9.*got 9"):
        tk_engram.engram_lookup(**inputs)


def test_out_is_written_and_returned(device: str) -> None:
    inputs = make(3, 2, 64, 9)(device)
    expected = tk_engram.engram_lookup(**inputs)
    # Also where it begins on no multiple of 16 bytes.
    for first in (0, 1):
        storage = torch.full((first + expected.numel() + 1,), torch.nan, dtype=torch.bfloat16, device=device)
        out = storage[first:-1].view(expected.shape)
        assert tk_engram.engram_lookup(**{**inputs, "out": out}) is out
        assert_equal(out, expected)
        assert storage[-1].isnan()


def test_a_host_table_is_accepted_under_a_fake_mode() -> None:
    with FakeTensorMode():
        indices = torch.empty(3, 2, dtype=torch.int32, device="cuda")
        out = tk_engram.engram_lookup(indices, torch.empty(9, 64, dtype=torch.bfloat16))
    assert out.device.type == "cuda"
    assert out.shape == (3, 2, 64)


INDICES = torch.zeros(3, 2, dtype=torch.int32)
TABLE = torch.ones(4, 64, dtype=torch.bfloat16)
CODES = {"table": TABLE.to(E4M3), "table_sf": torch.ones(4, 2)}
GOOD: dict[str, Any] = {"indices": INDICES, "table": TABLE, "out": torch.full((3, 2, 64), 7.0).bfloat16()}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"indices": INDICES.to("meta")}, ValueError, "table: .*device meta or pinned host memory, got 'cpu'$"),
        ({"table": TABLE[:0]}, ValueError, "table: .*at least one row"),
        ({"table": TABLE[:, :0]}, ValueError, "D .*table.*at least 32"),
        ({"table": TABLE[:, :48]}, ValueError, "D .*table.*multiple of 32"),
        ({"table": TABLE.to(E4M3)}, TypeError, "table_sf: .*Tensor"),
        ({"table_sf": torch.ones(4, 2)}, ValueError, "table_sf: .*None for a bfloat16 table"),
        ({**CODES, "table_sf": torch.ones(4, 4)}, ValueError, "table_sf: .*shape"),
        ({**CODES, "table_sf": torch.ones(3, 2)}, ValueError, "table_sf: .*shape"),
        ({"out": torch.ones(3, 64).bfloat16()}, ValueError, "out: .*shape"),
    ],
)


def test_host_tables_and_their_scales_must_be_pinned() -> None:
    with FakeTensorMode():
        indices = torch.empty(3, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"table: .*cuda.* or pinned host memory.*cpu, not pinned"):
        tk_engram.engram_lookup(indices, TABLE)
    codes = TABLE.to(E4M3)
    codes.is_pinned = lambda: True
    with pytest.raises(ValueError, match=r"table_sf: .*pinned"):
        tk_engram.engram_lookup(indices, codes, table_sf=torch.ones(4, 2))
    with backend("reference"), FakeTensorMode(allow_non_fake_inputs=True):  # which takes any scales
        assert tk_engram.engram_lookup(indices, codes, table_sf=torch.ones(4, 2)).shape == (3, 2, 64)


def test_single_scales_may_have_any_stride() -> None:
    table, sf = torch.ones(4, 32).to(E4M3), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    rows = torch.tensor([[3, 1]], dtype=torch.int32)
    out = tk_engram.engram_lookup(rows, table, table_sf=sf.T)
    assert out[0, :, 0].tolist() == [4.0, 2.0]


@pytest.mark.compile
@pytest.mark.parametrize("arch_name", SPEC.archs)
@pytest.mark.parametrize("sf_dtype", [None, torch.uint8])
def test_kernels_of_host_tables_compile(sf_dtype: torch.dtype | None, arch_name: str) -> None:
    arch = ARCHS[arch_name]
    dtype = torch.bfloat16 if sf_dtype is None else E4M3
    (usage,) = resource_usage(_engram_lookup_kernel, 256, dtype, sf_dtype, 8, True, arch).values()
    assert usage.stack_bytes == 0


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with everything on the GPU."""
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in inputs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "ue8m0", "float", "packed"])
@pytest.mark.parametrize("row_gap", [0, 3])
def test_gpu_reads_pinned_tables_in_place(kind: str, row_gap: int) -> None:
    inputs = make(1001, 5, 256, 997, kind=kind, row_gap=row_gap, host=True)("cuda")
    table = inputs["table"]
    assert table.is_pinned()
    for _ in range(3):
        assert_equal(tk_engram.engram_lookup(**inputs), tk_engram.engram_lookup(**on_device(inputs)))
    # Another table of the same kind, and new contents of this one: nothing was remembered or copied.
    other = make(1001, 5, 256, 997, kind=kind, row_gap=row_gap, host=True)("cuda")
    assert_equal(tk_engram.engram_lookup(**other), tk_engram.engram_lookup(**on_device(other)))
    if kind == "bf16":
        torch.cuda.synchronize()
        table.neg_()
        assert_equal(tk_engram.engram_lookup(**inputs), tk_engram.engram_lookup(**on_device(inputs)))


@pytest.mark.gpu
def test_gpu_device_and_host_tables_in_turn() -> None:
    inputs = make(17, 5, 64, 9, host=True)("cuda")
    moved = on_device(inputs)
    expected = reference.engram_lookup(**inputs)
    for kwargs in (moved, inputs, moved, moved, inputs):
        assert_equal(tk_engram.engram_lookup(**kwargs), expected)


@pytest.mark.gpu
def test_gpu_pinned_table_in_a_cuda_graph() -> None:
    inputs = make(17, 5, 64, 9, host=True)("cuda")
    expected = tk_engram.engram_lookup(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk_engram.engram_lookup(**inputs)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(out, expected)


@pytest.mark.gpu
def test_gpu_refuses_a_table_that_is_not_pinned() -> None:
    inputs = make(3, 2, 64, 9)("cpu")
    indices = inputs["indices"].cuda()
    with pytest.raises(ValueError, match=r"table: .*cuda.* or pinned host memory.*cpu, not pinned"):
        tk_engram.engram_lookup(indices, inputs["table"])
    with pytest.raises(ValueError, match=r"table: .*cuda.* or pinned host memory.*cpu, not pinned"):
        tk_engram.engram_lookup(indices[:0], inputs["table"])
    codes = make(3, 2, 64, 9, kind="float")("cpu")
    with pytest.raises(ValueError, match=r"table_sf: .*pinned"):
        tk_engram.engram_lookup(indices, codes["table"].pin_memory(), table_sf=codes["table_sf"])
    with pytest.raises(ValueError, match=r"table: .*device cpu.*cuda"):
        tk_engram.engram_lookup(inputs["indices"], inputs["table"].cuda())


@pytest.mark.gpu(gib=5)
def test_gpu_rows_beyond_two_to_the_31_elements() -> None:
    num_rows = 2**31 // 64 + 1000
    table = torch.empty(num_rows, 64, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.randint(num_rows - 900, num_rows, (33, 7), dtype=torch.int32, device="cuda")
    rows[0, 0], rows[0, 1] = num_rows - 1, 2**31 // 64
    assert_equal(tk_engram.engram_lookup(rows, table), table[rows.long()])


@pytest.mark.gpu(gib=5)
def test_gpu_results_beyond_two_to_the_31_elements() -> None:
    table = torch.randn(9, 1024, device="cuda").bfloat16()
    rows = torch.randint(-3, 9, (2**21 + 5, 1), dtype=torch.int32, device="cuda")
    out = tk_engram.engram_lookup(rows, table)
    assert_equal(out[-9:].clone(), reference.engram_lookup(rows[-9:], table))
