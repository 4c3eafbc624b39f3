"""topk_indices."""

import math
from itertools import combinations_with_replacement, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tk_indexer
from tk_core import env
from tk_core.arch import ARCHS
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.trees import empty
from tk_indexer import reference
from tk_indexer.selection.topk_indices import MAX_K, TopkIndicesConfig

INF, NAN = math.inf, math.nan
# Quiet and signalling NaNs of either sign.
NAN_BITS = (0x7FC00000, 0x7F800001, -0x00400000, -0x007FFFFF)


def values(kind: str, rows: int, cols: int, device: str) -> Tensor:
    """Float32 logits of a kind that is hard in one respect."""
    shape, column = (rows, cols), torch.arange(cols, device=device, dtype=torch.float32).expand(rows, cols)
    if kind == "equal":
        return torch.full(shape, 3.5, device=device)
    if kind == "two":
        return torch.randint(0, 2, shape, device=device).float()
    if kind == "one-bin":
        return 1 + torch.randint(0, max(cols, 1), shape, device=device) * 2.0**-23
    if kind == "ascending":
        return column.clone()
    if kind == "descending":
        return -column
    normal = torch.randn(shape, device=device)
    if kind == "shifted":
        return 100 + normal
    if kind == "denormals":
        return normal * 2.0**-130
    share = torch.rand(shape, device=device)
    if kind == "zeros":
        zero = torch.where(share < 0.5, 0.0, torch.full_like(normal, -0.0))
        return torch.where(torch.rand(shape, device=device) < 0.98, zero, normal)
    if kind == "special":
        nans = torch.tensor(NAN_BITS, dtype=torch.int32, device=device).view(torch.float32)
        chosen = nans[torch.randint(0, len(NAN_BITS), shape, device=device)]
        normal = torch.where(share < 0.02, chosen, normal)
        normal = torch.where((share > 0.1) & (share < 0.12), INF, normal)
        return torch.where(share > 0.5, -INF, normal)
    return normal


def make(
    rows: int,
    cols: int,
    k: int,
    kind: str = "normal",
    *,
    dtype: torch.dtype = torch.float32,
    window: bool = False,
    transform: str = "none",
    batches: int = 3,
    block_size: int = 32,
    raw: bool = False,
    out: str = "none",
    counts: bool = False,
    pad: int = 0,
    first_element: int = 0,
) -> Make:
    """Logits with `pad` columns between rows, from some element of their storage on; the op's options."""

    def build(device: str) -> dict[str, Any]:
        storage = empty(rows, cols + pad, dtype=dtype, device=device, first_element=first_element).fill_(NAN)
        logits = storage[:, :cols]
        logits.copy_(values(kind, rows, cols, device))
        integers = {"dtype": torch.int32, "device": device}
        options: dict[str, Any] = dict.fromkeys(("starts", "ends", "offsets", "block_table", "row_to_batch"))
        options |= {"block_size": 1, "rows_per_batch": 1}
        if window:
            options["starts"] = torch.randint(-3, cols // 2 + 2, (rows,), **integers)
            options["ends"] = torch.randint(cols // 3, cols + 4, (rows,), **integers)
        if transform == "offsets":
            options["offsets"] = torch.randint(-1000, 1000, (rows,), **integers)
        elif transform != "none":
            pages = max(cols // block_size - 1, 1)  # the last columns are on no page
            table = torch.randint(-2, 2**31 // block_size, (batches, pages + 3), **integers)
            options |= {"block_table": table[:, :pages], "block_size": block_size}
            if transform == "rows":
                options["row_to_batch"] = torch.randint(-1, batches, (rows,), **integers)
            else:
                options["rows_per_batch"] = -(-rows // batches)

        def result(between: int) -> Tensor:
            return torch.full((rows, k + between), 77, **integers)[:, :k]

        return {
            "logits": logits,
            "k": k,
            **options,
            "raw_out": result(3) if raw else None,
            "out": {"none": lambda: None, "given": lambda: result(0), "strided": lambda: result(5)}[out](),
            "return_counts": counts,
        }

    return build


BF16 = torch.bfloat16
KINDS = (
    *("equal", "two", "one-bin", "ascending", "descending", "shifted", "denormals", "zeros", "special"),
    "normal",
)


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """One read of the logits, one write of the indices."""
    logits = kwargs["logits"]
    return logits.numel() * logits.element_size() + logits.shape[0] * kwargs["k"] * 4


def bench(rows: int, cols: int, k: int, **more: Any) -> Case:
    kind = more.pop("kind", "normal")
    name = f"r{rows}-n{cols}-k{k}" + (f"-{kind}" if kind != "normal" else "")
    return bench_case(name, make(rows, cols, k, kind), **more)


SPEC = OpSpec(
    op=tk_indexer.topk_indices,
    mutates=("raw_out", "out"),
    least_bytes=least_bytes,
    cases=(
        Case("r5-n300-k7", make(5, 300, 7), small=True, modes=True),
        Case(
            "r5-n301-k20-window-offsets-raw",
            make(5, 301, 20, window=True, transform="offsets", raw=True, out="strided", pad=3, first_element=1),
            small=True,
            modes=True,
        ),
        Case(
            "r6-n320-k33-window-pages-counts",
            make(6, 320, 33, "special", window=True, transform="pages", counts=True, raw=True),
            small=True,
            modes=True,
        ),
        Case(
            "r7-n200-k33-rows", make(7, 200, 33, window=True, transform="rows", block_size=7, counts=True), small=True
        ),
        Case("r3-n64-k64-given", make(3, 64, 64, out="given"), small=True),
        Case("r3-n65-k100-too-few", make(3, 65, 100, "special", counts=True, window=True), small=True),
        Case("r2-n9-k4096-too-few", make(2, 9, 4096, transform="pages", batches=2, counts=True), small=True),
        Case("r3-n300-k20-bf16", make(3, 300, 20, dtype=BF16, window=True, pad=5, first_element=3), small=True),
        *(Case(f"r2-n300-k40-{kind}", make(2, 300, 40, kind, counts=True), small=True) for kind in KINDS),
        Case("r0-n300-k7", make(0, 300, 7, counts=True, transform="offsets"), small=True),
        Case("r3-n0-k7", make(3, 0, 7, counts=True, raw=True, out="strided"), small=True),
        # Compiled, with two more below: a block for a row with few columns and with many, clusters, bfloat16.
        Case("r300-n4352-k512", make(300, 4352, 512, transform="pages", batches=100, raw=True), compile=True),
        Case("r300-n20000-k2048-bf16", make(300, 20000, 2048, dtype=BF16, window=True), compile=True),
        Case("r4-n1048576-k2048", make(4, 2**20, 2048, window=True, counts=True), compile=True),
        Case("r9-n1048576-k512-bf16", make(9, 2**20, 512, dtype=BF16, counts=True)),
        Case("r16384-n8192-k2048", make(16384, 8192, 2048, window=True)),
        # Around k candidates, each thread block's and each cluster's columns; rows at any address.
        *(Case(f"r5-n{cols}-k512", make(5, cols, 512, counts=True)) for cols in (1, 511, 512, 513)),
        *(
            Case(
                f"r{rows}-n{cols}-k{k}-window",
                make(rows, cols, k, window=True, counts=True, transform="rows", pad=1, first_element=rows % 4),
            )
            for rows in (3, 140, 600)
            for cols, k in ((8191, 1), (16321, 63), (16385, 1000), (40001, 4096))
        ),
        Case("r1-n3000001-k4096", make(1, 3_000_001, 4096, window=True, counts=True)),
        Case("r200-n300001-k2048", make(200, 300_001, 2048, counts=True), compile=True),
        # All in one bin or in few, with one block and with clusters.
        *(
            Case(f"r{rows}-n{cols}-k{k}-{kind}", make(rows, cols, k, kind, counts=True))
            for kind in KINDS
            for rows, cols, k in ((160, 8192, 2048), (160, 40000, 1000), (3, 200_000, 2048))
        ),
        Case("r160-n8192-k2048-bf16", make(160, 8192, 2048, dtype=BF16), compile=True),
        Case("r3-n200000-k512-zeros-bf16", make(3, 200_000, 512, "zeros", dtype=BF16)),
        bench(2048, 65536, 2048, model_shape=True),
        bench(16384, 4352, 512, model_shape=True),
        bench(256, 65536, 2048, model_shape=True),
        *(bench(rows, cols, 2048) for rows in (1, 4, 32) for cols in (65536, 131072, 2**20)),
        bench(64, 131072, 2048),
        *(bench(2048, 65536, 2048, kind=kind) for kind in KINDS if kind != "normal"),
    ),
)


test_tiers = tiers.tests(SPEC)


# ---- by hand


def select(logits: list[list[float]], k: int, **options: Any) -> list[list[int]]:
    return tk_indexer.topk_indices(torch.tensor(logits), k, **options).tolist()


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_ties_and_special_values_by_hand() -> None:
    assert select([[1.0, 3.0, 2.0, 3.0, 3.0]], 2) == [[1, 3]]
    assert select([[0.0, -0.0, 0.0, -1.0]], 2) == [[0, 1]]
    assert select([[-0.0, -1.0, 0.0, 1e-45]], 2) == [[0, 3]]
    assert select([[INF, NAN, -INF, 1.0, NAN]], 2) == [[1, 4]]
    assert select([[INF, NAN, -INF, 1.0, NAN]], 4) == [[0, 1, 3, 4]]
    assert select([[INF, NAN, -INF, 1.0, NAN]], 6) == [[0, 1, 3, 4, -1, -1]]


def test_a_nan_of_any_bits_is_above_infinity_and_equals_any_other() -> None:
    nans = torch.tensor(NAN_BITS, dtype=torch.int32).view(torch.float32)
    for order in (nans, nans.flip(0)):
        row = torch.cat([torch.tensor([INF]), order])
        assert tk_indexer.topk_indices(row[None], 3).tolist() == [[1, 2, 3]]


def test_windows_are_clamped_by_hand() -> None:
    logits = [[5.0, 1.0, 4.0, 2.0]] * 6
    starts, ends = integers(-9, 1, 2, 0, 3, 9), integers(2, 9, 4, -1, 2, 12)
    found, counts = tk_indexer.topk_indices(torch.tensor(logits), 2, starts, ends, return_counts=True)
    assert found.tolist() == [[0, 1], [1, 2], [0, 1], [-1, -1], [-1, -1], [-1, -1]]
    assert counts.tolist() == [2, 2, 2, 0, 0, 0]


def test_transforms_by_hand() -> None:
    logits, starts = [[9.0, 0.0, 3.0, 0.0, 5.0, -INF]] * 3, integers(0, 1, 5)
    raw = torch.zeros(3, 3, dtype=torch.int32)
    shifted = select(logits, 3, starts=starts, offsets=integers(100, -7, 9), raw_out=raw)
    assert shifted == [[100, 102, 104], [-7, -6, -4], [-1, -1, -1]]
    assert raw.tolist() == [[0, 2, 4], [0, 1, 3], [-1, -1, -1]]
    table = torch.tensor([[7, -1], [2, 30]], dtype=torch.int32)
    # Pages of two columns: column 4 is past the table, column 2 of row 0 in a hole.
    assert select(logits, 3, block_table=table, block_size=2, rows_per_batch=2) == [
        [14, -1, -1],
        [14, -1, -1],
        [4, 60, -1],
    ]
    assert select(logits, 2, block_table=table, block_size=2, row_to_batch=integers(-5, 1, 0)) == [
        [-1, -1],
        [4, -1],
        [14, -1],
    ]


def test_positions_that_exceed_int32_are_left_out() -> None:
    table = torch.tensor([[2**26 - 1, 2**26, 2**31 - 1]], dtype=torch.int32)
    found = select([[0.0] * 96], 96, block_table=table, block_size=32)
    assert found == [[*range(2**31 - 32, 2**31), *[-1] * 64]]


def test_nothing_outside_of_the_result_is_written() -> None:
    memory = torch.full((3, 8), 55, dtype=torch.int32)
    tk_indexer.topk_indices(torch.rand(3, 20), 4, out=memory[:, 2:6])
    assert (memory[:, [0, 1, 6, 7]] == 55).all()
    assert (memory[:, 2:6] < 20).all()


# ---- against plain Python


def naive(row: list[float], k: int, start: int, end: int) -> list[int]:
    """Columns, relative to the clamped start."""
    start, end = (min(max(bound, 0), len(row)) for bound in (start, end))
    candidates = [c for c in range(start, end) if row[c] != -INF]
    best = sorted(candidates, key=lambda c: (not math.isnan(row[c]), 0 if math.isnan(row[c]) else -row[c], c))[:k]
    return sorted(c - start for c in best)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_reference_against_plain_python(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 12))
    k, block_size = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 5))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, INF, -INF, NAN, -NAN, 2.0, 3.0])
    logits = data.draw(st.lists(st.lists(value, min_size=cols, max_size=cols), min_size=rows, max_size=rows))
    dtype = data.draw(st.sampled_from([torch.float32, BF16]))
    x = torch.tensor(logits).reshape(rows, cols).to(dtype)
    bound = st.lists(st.integers(-3, cols + 3), min_size=rows, max_size=rows)
    starts, ends = data.draw(st.none() | bound), data.draw(st.none() | bound)
    options: dict[str, Any] = {}
    transform = data.draw(st.sampled_from(["none", "offsets", "pages", "rows"]))
    if transform == "offsets":
        offsets = data.draw(st.lists(st.integers(-99, 99), min_size=rows, max_size=rows))
        options["offsets"] = integers(*offsets)
    elif transform != "none":
        pages = data.draw(st.integers(0, 4))
        entry = st.integers(-2, 9)
        table = data.draw(st.lists(st.lists(entry, min_size=pages, max_size=pages), min_size=2, max_size=2))
        options |= {"block_table": torch.tensor(table, dtype=torch.int32).reshape(2, pages), "block_size": block_size}
        if transform == "rows":
            batches = data.draw(st.lists(st.integers(-2, 2), min_size=rows, max_size=rows))
            options["row_to_batch"] = integers(*batches)
        else:
            batches = [r // 2 for r in range(rows)]
            options["rows_per_batch"] = 2

    def expected(r: int) -> tuple[list[int], list[int]]:
        """The indices and the columns."""
        if transform == "rows" and not 0 <= batches[r] < 2:
            return [], []
        columns = naive(x[r].tolist(), k, starts[r] if starts else 0, ends[r] if ends else cols)
        if transform == "offsets":
            return [c + offsets[r] for c in columns], columns
        if transform == "none":
            return columns, columns
        blocks = [table[batches[r]][c // block_size] if c // block_size < pages else -1 for c in columns]
        return [-1 if b < 0 else b * block_size + c % block_size for b, c in zip(blocks, columns)], columns

    windows = [None if bounds is None else integers(*bounds) for bounds in (starts, ends)]
    raw = torch.zeros(rows, k, dtype=torch.int32)
    found, counts = tk_indexer.topk_indices(x, k, *windows, **options, raw_out=raw, return_counts=True)
    for r in range(rows):
        indices, columns = expected(r)
        padding = [-1] * (k - len(columns))
        assert (found[r].tolist(), raw[r].tolist()) == (indices + padding, columns + padding)
        assert counts[r] == len(columns)


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_against_plain_python(kind: str) -> None:
    torch.manual_seed(0)
    logits = values(kind, 2, 3000, "cpu")
    found = tk_indexer.topk_indices(logits, 700).tolist()
    for row, columns in zip(logits.tolist(), found):
        want = naive(row, 700, 0, 3000)
        assert columns == want + [-1] * (700 - len(want))


def test_chunks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make(7, 50, 9, "two", window=True, transform="rows", counts=True)("cpu")
    whole = reference.topk_indices(**kwargs)
    monkeypatch.setattr("tk_indexer.reference.selection._CHUNK_BYTES", 3 * 8 * 50)
    assert_equal(reference.topk_indices(**kwargs), whole)


# ---- bad input

TABLE = torch.zeros(2, 3, dtype=torch.int32)
GOOD: dict[str, Any] = {"logits": torch.zeros(4, 6), "k": 2}

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"logits": torch.empty(0, 2**31)}, ValueError, "logits.*fewer than 2.31 columns.*2147483648"),
        ({"k": 0}, ValueError, "k.*1 to 4096"),
        ({"k": 4097}, ValueError, "k.*1 to 4096"),
        ({"starts": integers(0, 0, 0)}, ValueError, "starts.*shape"),
        ({"ends": integers(0, 0, 0, 0, 0)}, ValueError, "ends.*shape"),
        ({"offsets": integers(0)}, ValueError, "offsets.*shape"),
        ({"out": torch.zeros(4, 3, dtype=torch.int32)}, ValueError, "out.*shape"),
        ({"out": torch.zeros(2, 4, dtype=torch.int32).T}, ValueError, "out.*stride 1"),
        ({"out": torch.zeros(1, 2, dtype=torch.int32).expand(4, 2)}, ValueError, "out.*apart in memory"),
        ({"raw_out": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "raw_out.*shape"),
        ({"block_size": 32}, ValueError, "block_size.*1 without block_table.*32"),
        ({"rows_per_batch": 2}, ValueError, "rows_per_batch.*1 without block_table"),
        ({"row_to_batch": integers(0, 0, 0, 0)}, ValueError, "row_to_batch.*None without block_table"),
        ({"block_table": TABLE}, ValueError, "block_table.*sequences for 4 rows.*2"),
        ({"block_table": TABLE, "rows_per_batch": 2, "block_size": 0}, ValueError, "block_size.*1 to"),
        ({"block_table": TABLE, "rows_per_batch": 0}, ValueError, "rows_per_batch.*1 to"),
        ({"block_table": TABLE, "rows_per_batch": 2, "offsets": integers(0, 0, 0, 0)}, ValueError, "offsets.*None"),
        (
            {"block_table": TABLE, "rows_per_batch": 2, "row_to_batch": integers(0, 0, 0, 0)},
            ValueError,
            "rows_per_batch.*with row_to_batch",
        ),
        ({"block_table": TABLE, "row_to_batch": integers(0, 0)}, ValueError, "row_to_batch.*shape"),
    ],
)


def test_debug_mode_refuses_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.tensor([[2**26], [0]], dtype=torch.int32)
    bad = {
        "starts": {"starts": integers(0, 7, 0, 0)},
        "ends": {"ends": integers(6, 6, 6, 7)},
        "row_to_batch": {"block_table": TABLE, "row_to_batch": integers(0, -1, 2, 0)},
        "block_table": {"block_table": large, "block_size": 32, "rows_per_batch": 2},
    }
    for options in bad.values():
        tk_indexer.topk_indices(**GOOD, **options)
    monkeypatch.setattr(env, "debug", lambda: True)
    for name, options in bad.items():
        with pytest.raises(ValueError, match=f"{name}: expected .* below"):
            tk_indexer.topk_indices(**GOOD, **options)
    ends = {"starts": integers(-1, 6, 0, 0), "ends": integers(6, 0, -2, 3)}
    table = {"block_table": large - 1, "block_size": 32, "row_to_batch": integers(1, -1, 0, 0)}
    tk_indexer.topk_indices(**GOOD, **ends, **table)


# ---- configurations


@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if arch.sm >= 90], ids=str)
@pytest.mark.parametrize("num_sms", [1, 20, 78, 132, 148])
def test_every_config_fits(arch: Any, num_sms: int) -> None:
    for rows, cols, k in product(
        (0, 1, 2, 8, 32, 33, 132, 133, 4096), (0, 1, 8192, 16320, 16321, 65536, 2**31 - 1), (1, 1024, 1025, MAX_K)
    ):
        config = TopkIndicesConfig.best(rows, cols, k, num_sms, arch)
        assert config.shared_memory_bytes + 1024 <= arch.max_shared_memory
        if arch.sm < 120 and k <= 1024:
            assert config.shared_memory_bytes + 512 <= arch.shared_memory_each(config.blocks_per_sm)
        assert config.cluster_size * rows <= num_sms or config.cluster_size == 1
        assert config.cluster_size <= 16
        assert config.room >= k
        assert cols + 62 <= 32 * config.num_words or config.threads == 1024
    shares = [TopkIndicesConfig.best(1, 2**bits, 64, 132, ARCHS["sm_90a"]).cluster_size for bits in range(10, 24)]
    assert shares[0] == 1
    assert shares[-1] == 16
    assert all(a <= b for a, b in pairwise(shares))


def test_all_clusters_of_an_h100_run_at_once() -> None:
    """However its 132 SMs are divided into 8 GPCs of 14, 16 or 18, as long as nine pairs at most are in one."""
    divisions = [each for each in combinations_with_replacement((14, 16, 18), 8) if sum(each) == 132]
    sizes = set()
    for rows in range(1, 133):
        size = TopkIndicesConfig.best(rows, 2**20, 2048, 132, ARCHS["sm_90a"]).cluster_size
        assert rows <= min(sum(sms // size for sms in each) for each in divisions)
        sizes.add(size)
    assert sizes == {1, 2, 3, 4, 8, 16}


# ---- on a GPU


@pytest.mark.gpu(gib=14)
def test_gpu_offsets_past_32_bits() -> None:
    """2048 rows of 2²⁰ logits, and three rows that lie 2³⁰ elements apart."""
    logits = torch.randn(2048, 2**20, device="cuda")
    found = tk_indexer.topk_indices(logits, 2048)
    for first in (0, 1023, 2040):
        rows = slice(first, first + 8)
        assert_equal(found[rows], reference.topk_indices(logits[rows], 2048))
    del logits, found
    apart = torch.empty_strided((3, 20000), (2**30, 1), dtype=BF16, device="cuda")
    apart.copy_(torch.randn(3, 20000, device="cuda"))
    assert_equal(tk_indexer.topk_indices(apart, 2048), reference.topk_indices(apart, 2048))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "two", "special"])
def test_gpu_the_number_of_blocks_does_not_matter(kind: str) -> None:
    logits = values(kind, 200, 70_000, "cuda")
    alone = tk_indexer.topk_indices(logits, 2048)
    for rows in (1, 7, 20, 60):
        assert_equal(tk_indexer.topk_indices(logits[:rows], 2048), alone[:rows])
