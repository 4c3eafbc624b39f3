"""fp8_fp4_paged_mqa_logits, fp8_paged_mqa_logits and get_paged_mqa_logits_metadata."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_indexer
from tk_core import env, get_num_sms
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.numeric import calc_diff
from tk_core.testing.trees import empty
from tk_indexer import reference
from tk_indexer.reference.casts import parts_of_cache
from tk_indexer.scores.paged import num_stages

from .test_mqa_logits import assert_close, fp4_rows, fp4_values

INF, NAN = math.inf, math.nan
E4M3, BF16, UINT8, INT32 = torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.int32
FLOAT4 = torch.float4_e2m1fn_x2


def make(
    lengths: tuple[int, ...],
    next_n: int = 1,
    num_heads: int = 64,
    dim: int = 128,
    block_kv: int = 64,
    *,
    dtype: torch.dtype = torch.float32,
    most: int | None = None,
    num_pages: int | None = None,
    num_blocks: int | None = None,
    clean: bool = True,
    gap: int | None = None,
    pad: int = 0,
    holes: bool = False,
    num_sms: int = 5,
    fp4: torch.dtype | None = None,
) -> Make:
    """Sequences whose last query sees so many keys, others fewer or more; blocks in any order, some shared.

    With `gap` the cache has four dimensions and blocks lie that many bytes apart. `pad` elements are between the rows
    of weights and of the block table. With `holes` some blocks are negative or too large.
    """

    def build(device: str) -> dict[str, Any]:
        num_seqs = len(lengths)
        pages = max((-(-x // block_kv) for x in lengths), default=0) if num_pages is None else num_pages
        blocks = num_seqs * pages + 2 if num_blocks is None else num_blocks
        key_bytes = dim if fp4 is None else dim // 2
        size = block_kv * (key_bytes + 4)
        memory = torch.zeros(blocks, size + (gap or 0), dtype=UINT8, device=device)
        cache = memory[:, :size].view(blocks, block_kv, *(() if gap is None else (1,)), key_bytes + 4)
        if fp4 is None:
            q = torch.randn(num_seqs, next_n, num_heads, dim, device=device).to(E4M3), None
            k = (torch.randn(blocks, block_kv, dim, device=device) * 4).to(E4M3)
            sf = torch.exp2(torch.randint(-6, 7, (blocks, block_kv), device=device).float())
        else:
            q = fp4_rows(num_seqs, next_n, num_heads, dim, device=device, dtype=fp4)
            k, sf = fp4_rows(blocks, block_kv, dim, device=device, dtype=UINT8)
        for part, x in zip(parts_of_cache(cache, key_bytes), (k, sf[..., None])):
            part.copy_(x.view(UINT8))
        table = torch.randint(0, max(blocks, 1), (num_seqs, pages + pad), dtype=INT32, device=device)[:, :pages]
        if holes:
            share = torch.rand(num_seqs, pages, device=device)
            table.copy_(torch.where(share < 0.2, -1 - table, torch.where(share > 0.9, table + blocks, table)))
        seen = torch.zeros(num_seqs, next_n, dtype=INT32, device=device)
        seen += torch.tensor(lengths, dtype=INT32, device=device)[:, None]
        if next_n > 1:
            seen[:, :-1] += torch.randint(-70, 3, (num_seqs, next_n - 1), dtype=INT32, device=device)
        weights = empty(num_seqs * next_n, num_heads + pad, dtype=torch.float32, device=device).fill_(NAN)
        weights = weights[:, :num_heads].copy_(torch.randn(num_seqs * next_n, num_heads, device=device))
        return {
            "q": q,
            "kv_cache": cache,
            "weights": weights,
            "context_lens": seen,
            "block_table": table,
            "schedule_meta": schedule_of(seen, num_sms),
            "max_context_len": max(lengths, default=0) if most is None else most,
            "clean_logits": clean,
            "logits_dtype": dtype,
        }

    return build


def schedule_of(seen: Tensor, num_sms: int) -> Tensor:
    """On the meta device a tensor alone: a case asks for no other op's kernels."""
    if seen.is_meta:
        return torch.empty(num_sms + 1, 2, dtype=INT32, device="meta")
    return tk_indexer.get_paged_mqa_logits_metadata(seen, 64, num_sms)


def bench(num_seqs: int, keys: int, next_n: int, fp4: torch.dtype | None = None, **more: Any) -> Case:
    """Full windows of 64 heads with 128 channels; each block of the cache is one sequence's."""

    def build(device: str) -> dict[str, Any]:
        kwargs = make((64,) * num_seqs, next_n, fp4=fp4)(device)
        blocks, key_bytes = num_seqs * keys // 64, 128 if fp4 is None else 64
        cache = torch.empty(blocks, 64, key_bytes + 4, dtype=UINT8, device=device)
        k, sf = parts_of_cache(cache, key_bytes)
        for part in torch.arange(blocks, device=device).split(4096):
            if fp4 is None:
                k[part] = torch.randn(len(part), 64, 128, device=device).to(E4M3).view(UINT8)
            else:
                k[part] = torch.randint(0, 256, (len(part), 64, 64), dtype=UINT8, device=device)
        sf.copy_(torch.ones(blocks, 64, 1, device=device).view(UINT8)) if fp4 is None else sf.fill_(127)
        seen = torch.full((num_seqs, next_n), keys, dtype=INT32, device=device)
        table = torch.randperm(blocks, device=device).view(num_seqs, keys // 64).int()
        schedule = schedule_of(seen, get_num_sms(device) if device.startswith("cuda") else 132)
        changed = {"kv_cache": cache, "context_lens": seen, "block_table": table, "schedule_meta": schedule}
        return {**kwargs, **changed, "max_context_len": keys, "clean_logits": False}

    return bench_case(f"b{num_seqs}-n{keys}-next{next_n}{'' if fp4 is None else '-fp4'}", build, **more)


SPEC = OpSpec(
    op=tk_indexer.fp8_fp4_paged_mqa_logits,
    compare=assert_close,
    cases=(
        Case("b3-next1-h64-d128", make((70, 0, 133)), small=True, modes=True, compile=True),
        Case(
            "b3-next3-h64-d128-holes-apart-bf16",
            make((300, 64, 1), 3, dtype=BF16, most=333, gap=48, pad=3, holes=True),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("b4-next5-h16-d32-kv32", make((5, 31, 97, 0), 5, 16, 32, 32, holes=True), small=True, compile=True),
        Case("b2-next3-h32-d64-kv128", make((129, 250), 3, 32, 64, 128, gap=16), small=True, compile=True),
        Case("b3-next2-h64-d128-cut", make((190, 65, 128), 2, most=100, num_pages=2), small=True, modes=True),
        Case("b2-next2-h64-d128-few-pages", make((300, 200), 2, num_pages=2, most=290, num_sms=300), small=True),
        Case("b3-next1-h64-d128-fp4", make((70, 0, 133), fp4=torch.int8), small=True, modes=True, compile=True),
        Case(
            "b3-next3-h64-d128-fp4-holes-apart-bf16",
            make((300, 64, 1), 3, dtype=BF16, most=333, gap=48, pad=3, holes=True, fp4=UINT8),
            small=True,
        ),
        Case(
            "b4-next5-h16-d64-kv32-fp4",
            make((5, 31, 97, 0), 5, 16, 64, 32, holes=True, fp4=FLOAT4),
            small=True,
            compile=True,
        ),
        Case("b2-next1-h64-d128-fp4-no-blocks", make((5, 6), num_blocks=0, fp4=torch.int8), small=True),
        Case("b0-next1-h64-d128-fp4", make((), num_pages=3, most=9, fp4=torch.int8), small=True),
        Case("b0-next1-h64-d128", make((), num_pages=3, most=9), small=True),
        Case("b2-next1-h64-d128-no-columns", make((5, 6), most=0), small=True),
        Case("b2-next1-h64-d128-no-blocks", make((5, 6), num_blocks=0), small=True),
        Case("b2-next2-h64-d128-no-pages", make((5, 6), 2, num_pages=0), small=True),
        Case("b2-next1-h64-d128-empty", make((0, -3), most=7, num_pages=1), small=True),
        *(
            Case(
                f"b{len(lengths)}-next{next_n}-h{h}-d{d}-kv{block_kv}-{'bf16' if dtype is BF16 else 'f32'}",
                make(lengths, next_n, h, d, block_kv, dtype=dtype, holes=next_n % 2 == 0, pad=1, num_sms=132),
            )
            for lengths, next_n, h, d, block_kv, dtype in (
                ((4001, 2, 64, 640), 2, 64, 128, 64, torch.float32),
                ((4001, 0, 63, 700), 4, 64, 128, 64, torch.float32),
                ((300, 5000, 65), 6, 64, 128, 64, BF16),
                ((1000, 1, 129), 8, 64, 128, 32, torch.float32),
                ((999, 3000), 7, 64, 64, 128, torch.float32),
                ((77, 1003), 1, 32, 128, 64, torch.float32),
                ((5003, 1), 2, 32, 128, 64, BF16),
                ((800, 801), 5, 32, 32, 128, torch.float32),
                ((901, 17), 8, 32, 64, 32, torch.float32),
                ((2000, 64), 1, 16, 128, 64, torch.float32),
                ((513, 4000), 4, 16, 64, 128, BF16),
                ((513, 1999), 8, 16, 128, 32, torch.float32),
            )
        ),
        *(
            Case(
                f"b{len(lengths)}-next{next_n}-h{h}-d{d}-kv{block_kv}-fp4",
                make(lengths, next_n, h, d, block_kv, holes=next_n % 2 == 0, pad=1, num_sms=132, fp4=fp4),
            )
            for lengths, next_n, h, d, block_kv, fp4 in (
                ((4001, 2, 64, 640), 2, 64, 128, 64, torch.int8),
                ((1000, 1, 129), 8, 64, 128, 32, UINT8),
                ((999, 3000), 7, 64, 64, 128, FLOAT4),
                ((77, 5003), 1, 32, 128, 128, torch.int8),
                ((513, 4000), 4, 16, 64, 32, UINT8),
            )
        ),
        Case("b300-next1-h64-d128-fp4", make(tuple(i * i % 997 for i in range(300)), num_sms=132, fp4=torch.int8)),
        Case("b300-next1-h64-d128", make(tuple(i * i % 997 for i in range(300)), num_sms=132)),
        Case("b300-next2-h64-d128", make(tuple(i % 37 * 11 for i in range(300)), 2, num_sms=132)),
        Case("b2-next1-h64-d128-long", make((70_001, 9), most=80_000, num_sms=132)),
        *(
            bench(num_seqs, keys, next_n, model_shape=(keys, next_n) in ((8192, 1), (8192, 2), (131072, 1)))
            for num_seqs, keys in ((256, 8192), (256, 65536), (32, 131072))
            for next_n in (1, 2, 4, 6)
        ),
        *(
            bench(num_seqs, keys, next_n, torch.int8, model_shape=(keys, next_n) == (8192, 1))
            for num_seqs, keys, next_n in (*((256, 8192, n) for n in (1, 2, 4)), (256, 65536, 1), (32, 131072, 1))
        ),
    ),
)

test_tiers = tiers.tests(SPEC)


# ---- by hand


def cache_of(k: Tensor, sf: Tensor) -> Tensor:
    """A cache of keys (blocks, block_kv, D) and their factors (blocks, block_kv)."""
    blocks, block_kv, dim = k.shape
    cache = torch.zeros(blocks, block_kv, dim + 4, dtype=UINT8, device=k.device)
    for part, x in zip(parts_of_cache(cache, dim), (k.to(E4M3), sf.float()[..., None])):
        part.copy_(x.contiguous().view(UINT8))
    return cache


def by_hand() -> dict[str, Any]:
    """Two queries of a sequence of three keys in the pages 3 and 1; head 0 sees channel 0, head 1 channel 1."""
    q, k, sf, weights = torch.zeros(1, 2, 16, 32), torch.zeros(4, 32, 32), torch.ones(4, 32), torch.zeros(2, 16)
    q[0, 0, 0, 0], q[0, 0, 1, 1], q[0, 1, 0, 0] = 2, 3, -1
    weights[0, 0], weights[0, 1], weights[1, 0] = 10, -1, 7
    k[3, 30, 0], k[3, 30, 1], k[3, 31, 0], k[1, 0, 1] = 1, 4, -8, 5
    sf[3, 31], sf[1, 0] = 2, 0.5
    seen = torch.tensor([[33, 32]], dtype=INT32)
    return {
        "q": (q.to(E4M3), None),
        "kv_cache": cache_of(k, sf),
        "weights": weights,
        "context_lens": seen,
        "block_table": torch.tensor([[3, 1]], dtype=INT32),
        "schedule_meta": tk_indexer.get_paged_mqa_logits_metadata(seen, 32, 2),
        "max_context_len": 40,
        "clean_logits": True,
    }


def test_by_hand() -> None:
    kwargs = by_hand()
    found = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    # Row 0: 10·max(2·k0, 0) - max(3·k1, 0); row 1: 7·max(-k0, 0).
    assert found[:, :30].tolist() == [[0] * 30] * 2
    assert found[:, 30:].tolist() == [[20 - 12, 0, -7.5, *[-INF] * 7], [0, 112, *[-INF] * 8]]
    assert found.stride() == (256, 1)
    hole = {**kwargs, "block_table": torch.tensor([[-7, 1]], dtype=INT32), "logits_dtype": BF16}
    found = tk_indexer.fp8_fp4_paged_mqa_logits(**hole)
    assert found.tolist() == [[*[-INF] * 32, -7.5, *[-INF] * 7], [-INF] * 40]
    assert found.stride() == (512, 1)


def test_nan_is_where_it_came_from() -> None:
    found = {}
    for name in ("q", "k", "sf", "weights"):
        kwargs = by_hand()
        k, sf = parts_of_cache(kwargs["kv_cache"], 32)
        if name == "q":
            kwargs["q"][0][0, 1, 9, 3] = NAN
        elif name == "weights":
            kwargs["weights"][1, 5] = NAN
        else:
            (k[3, 31, 7:8] if name == "k" else sf[3, 31]).fill_(0x7F if name == "k" else 0xFF)
        found[name] = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs).isnan().nonzero().tolist()
    row = [[1, column] for column in range(32)]
    assert found == {"q": row, "weights": row, "k": [[0, 31], [1, 31]], "sf": [[0, 31], [1, 31]]}
    kwargs = by_hand()
    expected = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    kwargs["kv_cache"][[0, 2]] = 0xFF
    k, sf = parts_of_cache(kwargs["kv_cache"], 32)
    k[1, 1:], sf[1, 1:] = 0x7F, 0xFF
    assert_equal(tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs), expected)


def gathered(kwargs: dict[str, Any], block_kv: int, seq: int) -> tuple[Tensor, Tensor]:
    """Keys and factors of a sequence's pages; zeros from holes."""
    table, device = kwargs["block_table"][seq : seq + 1].contiguous(), kwargs["block_table"].device
    num_keys, dim = table.shape[1] * block_kv, kwargs["q"][0].shape[-1] * (1 if kwargs["q"][1] is None else 2)
    k = torch.zeros(num_keys, dim, dtype=torch.uint8, device=device).view(E4M3)
    sf = torch.zeros(num_keys, device=device)
    bounds = torch.tensor([0, num_keys], dtype=INT32, device=device)
    tk_indexer.cp_gather_indexer_k_quant_cache(kwargs["kv_cache"], k, sf, table, bounds)
    return k, sf


@pytest.mark.parametrize(
    ("next_n", "num_heads", "dim", "block_kv"),
    [(1, 64, 128, 64), (2, 64, 128, 64), (3, 64, 64, 128), (5, 64, 128, 32), (3, 32, 32, 64), (1, 16, 128, 32)],
)
def test_equals_dense_scores(next_n: int, num_heads: int, dim: int, block_kv: int, device: str) -> None:
    """Each sequence's scores are those of its gathered keys; on a GPU in every bit."""
    torch.manual_seed(0)
    kwargs = make((401, 64, 1, 250), next_n, num_heads, dim, block_kv, pad=2, gap=32)(device)
    scores = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    for seq, lengths in enumerate(kwargs["context_lens"]):
        rows = slice(seq * next_n, (seq + 1) * next_n)
        q = kwargs["q"][0][seq].clone()
        window = torch.zeros_like(lengths), lengths.clamp(max=401)
        operands = (q, None), gathered(kwargs, block_kv, seq), kwargs["weights"][rows]
        expected = tk_indexer.fp8_fp4_mqa_logits(*operands, *window, max_seqlen_k=401)
        compare = assert_equal if device == "cuda" else assert_close
        compare(scores[rows].contiguous(), expected.contiguous())


@pytest.mark.parametrize(
    ("next_n", "num_heads", "dim", "block_kv"),
    [(1, 64, 128, 64), (2, 64, 128, 64), (3, 64, 64, 128), (5, 64, 128, 32), (8, 64, 128, 64), (1, 16, 64, 32)],
)
def test_fp4_equals_dense_scores(next_n: int, num_heads: int, dim: int, block_kv: int, device: str) -> None:
    """Of the gathered FP4 keys, on a GPU in every bit; factors differ by so much that some values are rounded."""
    torch.manual_seed(0)
    kwargs = make((401, 64, 1, 250), next_n, num_heads, dim, block_kv, pad=2, gap=32, fp4=torch.int8)(device)
    parts_of_cache(kwargs["kv_cache"], dim // 2)[1][:, ::3, 0] += 30
    scores = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    table, num_keys = kwargs["block_table"], kwargs["block_table"].shape[1] * block_kv
    bounds = torch.tensor([0, num_keys], dtype=INT32, device=device)
    for seq, lengths in enumerate(kwargs["context_lens"]):
        rows = slice(seq * next_n, (seq + 1) * next_n)
        kv = (
            torch.empty(num_keys, dim // 2, dtype=torch.int8, device=device),
            torch.empty_like(bounds[:1].expand(num_keys)),
        )
        tk_indexer.cp_gather_indexer_k_quant_cache(kwargs["kv_cache"], *kv, table[seq : seq + 1].contiguous(), bounds)
        q = tuple(x[seq].clone() for x in kwargs["q"])
        window = torch.zeros_like(lengths), lengths.clamp(max=401)
        expected = tk_indexer.fp8_fp4_mqa_logits(q, kv, kwargs["weights"][rows], *window, max_seqlen_k=401)
        compare = assert_equal if device == "cuda" else assert_close
        compare(scores[rows].contiguous(), expected.contiguous())


def test_fp4_against_float64() -> None:
    """Of a sequence whose pages are in order."""
    kwargs = make((192,), 2, 16, 64, num_blocks=3, fp4=torch.int8)("cpu")
    kwargs["block_table"].copy_(torch.arange(3))
    kwargs["context_lens"].fill_(192)
    k, sf = (x.flatten(0, 1) for x in parts_of_cache(kwargs["kv_cache"], 32))
    q, k = fp4_values(kwargs["q"])[0], fp4_values((k, sf.contiguous().view(INT32)[:, 0]))
    products = torch.einsum("shd,nd->shn", q, k).clamp(min=0) * kwargs["weights"].double()[..., None]
    assert calc_diff(tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs), products.sum(1)) < 1e-7


@pytest.mark.parametrize("fp4", [None, torch.int8])
def test_a_cache_of_68_bytes_is_what_the_queries_are(fp4: torch.dtype | None, device: str) -> None:
    """64 channels in FP8, or 128 in FP4."""
    kwargs = make((70, 20), 1, 16, 64 if fp4 is None else 128, fp4=fp4)(device)
    assert kwargs["kv_cache"].shape[-1] == 68
    assert_close(
        tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs).cpu(),
        reference.fp8_fp4_paged_mqa_logits(**kwargs).cpu(),
    )


def test_fp8_paged_mqa_logits_is_a_view(device: str) -> None:
    kwargs = make((300, 20), 2)(device)
    expected = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    del kwargs["logits_dtype"]
    indices = torch.arange(2, dtype=INT32, device=device)
    assert_equal(tk_indexer.fp8_paged_mqa_logits(**{**kwargs, "q": kwargs["q"][0], "indices": indices}), expected)


def test_selection_needs_no_cleaning(device: str) -> None:
    """The lengths, as they are, are the ends of the windows."""
    kwargs = make((300, 20, 64), 2, holes=True, clean=False)(device)
    clean = tk_indexer.fp8_fp4_paged_mqa_logits(**{**kwargs, "clean_logits": True})
    expected = tk_indexer.topk_indices(clean, 40)
    ends = kwargs["context_lens"].view(-1)
    assert_equal(
        tk_indexer.topk_indices(tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs), 40, None, ends),
        expected,
    )


def test_chunks_of_pages_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make((300, 20, 64), 2, holes=True)("cpu")
    whole = reference.fp8_fp4_paged_mqa_logits(**kwargs)
    for num_pages in (1, 2, 10):
        monkeypatch.setattr("tk_indexer.reference.scores._CHUNK_BYTES", 8 * 2 * 64 * 64 * num_pages)
        assert_close(reference.fp8_fp4_paged_mqa_logits(**kwargs), whole)


# ---- the schedule


def make_lengths(num_seqs: int, next_n: int, num_sms: int, highest: int = 5000) -> Make:
    def build(device: str) -> dict[str, Any]:
        seen = torch.randint(-highest // 3, highest, (num_seqs, next_n), dtype=INT32, device=device)
        return {"context_lens": seen, "block_kv": 64, "num_sms": num_sms}

    return build


SCHEDULE = OpSpec(
    op=tk_indexer.get_paged_mqa_logits_metadata,
    cases=(
        Case("b3-next2-n5", make_lengths(3, 2, 5), small=True, modes=True, compile=True),
        Case("b700-next1-n132", make_lengths(700, 1, 132), small=True, modes=True),
        Case("b1-next1-n600", make_lengths(1, 1, 600), small=True),
        Case("b0-next1-n4", make_lengths(0, 1, 4), small=True),
        Case("b9-next3-n1", make_lengths(9, 3, 1), small=True),
        Case("b5-next8-n132-wild", make_lengths(5, 8, 132, 2**31 - 1), small=True),
        Case("b70000-next1-n132-wild", make_lengths(70_000, 1, 132, 2**31 - 1)),
        bench_case("b256-next1-n132", make_lengths(256, 1, 132)),
    ),
)

test_schedule_tiers = tiers.tests(SCHEDULE)


def test_schedule_by_hand() -> None:
    seen = torch.tensor([[100, 1], [0, -5], [64, 65], [1, 129]], dtype=INT32)
    # Chunks of 64 keys: 2, 0, 2, 3.
    found = tk_indexer.get_paged_mqa_logits_metadata(seen, 64, 4)
    assert found.tolist() == [[0, 0], [0, 1], [2, 1], [3, 1], [4, 0]]
    assert tk_indexer.get_paged_mqa_logits_metadata(seen[1:2], 64, 2).tolist() == [[0, 0], [1, 0], [1, 0]]


@pytest.mark.parametrize("num_sms", [1, 5, 132, 1000])
def test_a_schedule_shares_all_chunks_equally(num_sms: int) -> None:
    torch.manual_seed(num_sms)
    seen = torch.randint(-300, 3000, (40, 3), dtype=INT32)
    chunks = [-(-max(*row, 0) // 64) for row in seen.tolist()]
    bounds = tk_indexer.get_paged_mqa_logits_metadata(seen, 64, num_sms).tolist()
    assert bounds[0] == [0, 0]
    assert bounds[-1] == [40, 0]
    places = [sum(chunks[:seq]) + chunk for seq, chunk in bounds]
    assert {b - a for a, b in pairwise(places)} <= {sum(chunks) // num_sms, sum(chunks) // num_sms + 1}


# ---- bad input

GOOD = make((40, 7), 2)("cpu")
FP4 = make((40, 7), 2, fp4=torch.int8)("cpu")
Q, TABLE, SCHEDULED = GOOD["q"][0], GOOD["block_table"], GOOD["schedule_meta"]

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"q": Q}, TypeError, r"^q: expected a pair \(data, sf or None\)"),
        ({"q": (Q, torch.zeros(2, 2, 64))}, TypeError, r"^q\[1\]: expected None"),
        ({**FP4, "q": (FP4["q"][0], None)}, TypeError, r"^q\[1\]: expected a torch.Tensor, got NoneType"),
        ({**FP4, "q": (FP4["q"][0], FP4["q"][1][:, :1])}, ValueError, r"^q\[1\].*shape \(2, 2, 64\)"),
        ({**FP4, "q": (FP4["q"][0][..., :16].contiguous(), FP4["q"][1])}, ValueError, r"^q\[0\] \(D\).*64, 128.*32"),
        ({"q": FP4["q"]}, ValueError, "^kv_cache.*68.*132"),
        ({"q": (torch.zeros(2, 0, 64, 128).to(E4M3), None)}, ValueError, r"^q\[0\] \(next_n\).*1 to 8.*0"),
        ({"q": (torch.zeros(2, 9, 64, 128).to(E4M3), None)}, ValueError, r"^q\[0\] \(next_n\).*1 to 8.*9"),
        ({"q": (Q[:, :, :8].contiguous(), None)}, ValueError, r"^q\[0\] \(H\).*16, 32, 64.*8"),
        ({"q": (torch.zeros(2, 2, 64, 96).to(E4M3), None)}, ValueError, r"^q\[0\] \(D\).*32, 64, 128.*96"),
        ({"kv_cache": torch.zeros(2, 64, 68, dtype=UINT8)}, ValueError, "^kv_cache.*132.*68"),
        ({"kv_cache": torch.zeros(2, 16, 132, dtype=UINT8)}, ValueError, r"^kv_cache \(block_kv\).*32, 64, 128.*16"),
        ({"weights": torch.zeros(2, 64)}, ValueError, r"^weights.*shape \(4, 64\)"),
        ({"context_lens": torch.zeros(2, 1, dtype=INT32)}, ValueError, r"^context_lens.*shape \(2, 2\)"),
        ({"block_table": TABLE[:1]}, ValueError, r"^block_table.*shape \(2, M\)"),
        ({"schedule_meta": SCHEDULED[:, :1].contiguous()}, ValueError, r"^schedule_meta.*shape \(n \+ 1, 2\)"),
        ({"schedule_meta": SCHEDULED[:1]}, ValueError, "^schedule_meta: expected at least 2 rows, got 1"),
        ({"max_context_len": -1}, ValueError, "^max_context_len"),
        ({"max_context_len": 2**31}, ValueError, "^max_context_len"),
        ({"clean_logits": 1}, TypeError, "^clean_logits: expected a bool, got 1"),
        ({"logits_dtype": torch.float16}, TypeError, "^logits_dtype"),
        ({"indices": torch.zeros(2, 2, dtype=INT32)}, ValueError, "^indices"),
    ],
)

test_bad_schedule_input = tiers.bad_input(
    SCHEDULE,
    {"context_lens": torch.zeros(2, 2, dtype=INT32), "block_kv": 64, "num_sms": 3},
    [
        ({"context_lens": torch.zeros(2, 9, dtype=INT32)}, ValueError, r"^context_lens \(next_n\).*1 to 8.*9"),
        ({"block_kv": 16}, ValueError, "^block_kv.*32, 64, 128.*16"),
        ({"num_sms": 0}, ValueError, "^num_sms"),
        ({"num_sms": 65537}, ValueError, "^num_sms"),
    ],
)


def test_debug_mode_refuses_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    good = {**GOOD, "context_lens": torch.tensor([[40, 40], [-7, 0]], dtype=INT32)}
    tk_indexer.fp8_fp4_paged_mqa_logits(**{**good, "block_table": torch.full_like(TABLE, -1)})
    blocks = len(GOOD["kv_cache"])
    for name, value in (
        ("context_lens", torch.tensor([[40, 41], [0, 0]], dtype=INT32)),
        ("block_table", torch.full_like(TABLE, blocks)),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected .* below"):
            tk_indexer.fp8_fp4_paged_mqa_logits(**{**good, name: value})


def test_other_architectures() -> None:
    with capture(arch_from_name("sm_120a")), pytest.raises(UnsupportedArchError, match=r"paged_mqa_logits.*sm_120a"):
        tk_indexer.fp8_fp4_paged_mqa_logits(**make((600,))("meta"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_stage_is_always_the_same_warpgroups(arch: str) -> None:
    """Else a warpgroup could take a stage's last round but one for its own: barriers tell odd rounds from even ones."""
    for columns in (16, 48, 128, 192, 256, 384, 512):
        for dim in (32, 64, 128):
            stages = num_stages(columns, dim, False, arch_from_name(arch))
            assert stages % 3 == 0
            assert stages >= 6
            # The six places of widened FP4 are taken in turn.
            assert num_stages(columns, dim, True, arch_from_name(arch)) in (6, 12, 18, 24)


# ---- on a GPU


@pytest.mark.gpu(gib=4)
@pytest.mark.parametrize(
    ("next_n", "num_heads", "fp4"),
    [(1, 64, None), (2, 64, None), (5, 64, None), (3, 16, None), (1, 64, torch.int8), (5, 64, torch.int8)],
)
def test_gpu_bits_do_not_depend_on_the_schedule(next_n: int, num_heads: int, fp4: torch.dtype | None) -> None:
    """A score is the same for any schedule, for other sequences beside it, in shared pages, and in 20 runs."""
    kwargs = make((3000, 5, 700, 0, 64), next_n, num_heads, holes=True, num_sms=132, fp4=fp4)("cuda")
    seen = kwargs["context_lens"]
    expected = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    for _ in range(20):
        assert_equal(tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs), expected)
    others = [tk_indexer.get_paged_mqa_logits_metadata(seen, 64, n) for n in (1, 2, 7, 131, 300)]
    others += [tk_indexer.get_paged_mqa_logits_metadata(x, 64, 132) for x in (seen // 3, seen * 5, seen * 0)]
    for schedule in others:
        assert_equal(tk_indexer.fp8_fp4_paged_mqa_logits(**{**kwargs, "schedule_meta": schedule}), expected)
    for seq in range(5):
        rows, one = slice(seq * next_n, (seq + 1) * next_n), slice(seq, seq + 1)
        q = tuple(x if x is None else x[one].clone() for x in kwargs["q"])
        alone = {**kwargs, "q": q, "weights": kwargs["weights"][rows]}
        alone |= {"context_lens": seen[one].clone(), "block_table": kwargs["block_table"][one]}
        alone["schedule_meta"] = tk_indexer.get_paged_mqa_logits_metadata(alone["context_lens"], 64, 132)
        found = tk_indexer.fp8_fp4_paged_mqa_logits(**alone)
        assert_equal(found.contiguous(), expected[rows].contiguous())
    # All pages are one.
    kwargs["block_table"].fill_(3)
    found = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)[:next_n]
    one_page = found[:, :64].repeat(1, 47)[:, :3000]
    column = torch.arange(3000, device="cuda")
    assert_equal(found.flatten(), one_page.where(column < seen[0][:, None], -INF).flatten())


@pytest.mark.gpu
def test_gpu_nan_matters_only_where_it_is_read() -> None:
    """Behind the lengths, in blocks that no page has, and in queries of the next sequence."""
    kwargs = make((700, 65, 1), 3)("cuda")
    kwargs["context_lens"][0, :2] = 333
    expected = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    assert not expected.isnan().any()
    k, sf = parts_of_cache(kwargs["kv_cache"], 128)
    table, longest = kwargs["block_table"], kwargs["context_lens"].amax(dim=1).tolist()
    is_read = torch.zeros(k.shape[:2], dtype=torch.bool, device="cuda")
    for seq, length in enumerate(longest):
        key = torch.arange(length, device="cuda")
        is_read[table[seq, key // 64].long(), key % 64] = True
    assert not is_read.all()
    k[~is_read], sf[~is_read] = 0x7F, 0xFF
    assert_equal(tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs), expected)
    kwargs["q"][0][1].fill_(NAN)
    kwargs["weights"][7, 63] = NAN
    block, key = int(table[0, 5]), 5 * 64 + 9
    k.view(torch.uint8)[block, 9, 127] = 0xFF
    found = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    row, column = torch.arange(9, device="cuda")[:, None], torch.arange(700, device="cuda")
    is_same = table[row // 3, column // 64] == block
    is_nan = (row // 3 == 1) | (row == 7) | (is_same & (column % 64 == key % 64))
    assert torch.equal(found.isnan(), is_nan & (column < kwargs["context_lens"].view(-1)[:, None]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gpu_without_cleaning_windows_are_the_same(dtype: torch.dtype) -> None:
    kwargs = make((700, 65, 1, 0), 3, dtype=dtype, holes=True, most=777)("cuda")
    clean = tk_indexer.fp8_fp4_paged_mqa_logits(**kwargs)
    found = tk_indexer.fp8_fp4_paged_mqa_logits(**{**kwargs, "clean_logits": False})
    column = torch.arange(777, device="cuda")
    assert torch.equal(found.where(column < kwargs["context_lens"].view(-1)[:, None], -INF), clean)


@pytest.mark.gpu(gib=16)
def test_gpu_offsets_past_32_bits() -> None:
    """2400 rows of 2²⁰ scores, and a cache of 2.2 · 10⁹ bytes whose last blocks are used."""
    blocks = 1 << 18
    kwargs = make((64,) * 300, 8, num_pages=2, num_blocks=4)("cuda")
    cache = torch.zeros(blocks, 64, 132, dtype=UINT8, device="cuda")
    cache[-4:] = kwargs["kv_cache"]
    found = tk_indexer.fp8_fp4_paged_mqa_logits(
        **{**kwargs, "kv_cache": cache, "block_table": kwargs["block_table"] + (blocks - 4), "max_context_len": 1 << 20}
    )
    expected = tk_indexer.fp8_fp4_paged_mqa_logits(**{**kwargs, "max_context_len": 128})
    assert_equal(found[:, :128].contiguous(), expected.contiguous())
    assert found[:, 128:].isneginf().all()
