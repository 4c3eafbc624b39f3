"""`import tk_indexer as deep_gemm`: DeepGEMM's calls on Hopper, beside DeepGEMM itself where it can be imported."""

import importlib.util
import inspect
import os
import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_indexer as deep_gemm
from tk_core import get_num_sms
from tk_core.testing.numeric import calc_diff
from tk_indexer import reference

from .test_mqa_logits import make as make_dense
from .test_paged_mqa_logits import make as make_paged

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = ((64, 128), (32, 128), (64, 64))
"""Heads and channels that DeepGEMM takes."""
# 72 and 144 cases, as many as in DeepGEMM's own test.
DENSE = tuple(
    product(
        ((2048, 4096), (4096, 8192), (515, 4111)),  # queries, keys
        SHAPES,
        ("causal", "context-parallel"),
        (False, True),  # compressed: a column for each key of the window
        (F32, BF16),
    )
)
PAGED = tuple(
    product(
        ((1, 9000), (32, 4096), (128, 2048), (77, 1000)),  # sequences, their mean length
        SHAPES,
        (1, 2),  # queries of a sequence
        ("equal", "uneven", "mostly short"),
        (F32, BF16),
    )
)


def sampled(cases: tuple[Any, ...], share: int) -> list[Any]:
    """A share of the 216 cases; DG_MQA_NUM_CASES says how many of all are wanted."""
    wanted = int(os.environ.get("DG_MQA_NUM_CASES", "40"))
    return random.Random(0).sample(cases, min(len(cases), max(1, wanted * share // 216)))


_DENSE = "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits max_seqlen_k"
_PAGED = "q kv_cache weights context_lens block_table schedule_meta max_context_len clean_logits"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("fp8_mqa_logits", _DENSE),
        ("fp8_fp4_mqa_logits", f"{_DENSE} logits_dtype schedule_meta"),
        ("fp8_paged_mqa_logits", f"{_PAGED} indices"),
        ("fp8_fp4_paged_mqa_logits", f"{_PAGED} logits_dtype indices"),
        ("get_paged_mqa_logits_metadata", "context_lens block_kv num_sms indices"),
    ],
)
def test_arguments_have_its_names_and_order(name: str, parameters: str) -> None:
    assert list(inspect.signature(getattr(deep_gemm, name)).parameters) == parameters.split()


def lengths_of(kind: str, num_seqs: int, mean: int) -> tuple[int, ...]:
    """Lengths of sequences."""
    draw = random.Random(num_seqs)
    if kind == "equal":
        return (mean,) * num_seqs
    if kind == "uneven":
        return tuple(int(mean * draw.uniform(0.7, 1.3)) for _ in range(num_seqs))
    return tuple(mean if draw.random() < 0.1 else draw.randint(1, 100) for _ in range(num_seqs))


def assert_scores(found: Tensor, expected: Tensor, is_seen: Tensor, limit: float) -> None:
    """Where a query sees a key."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert calc_diff(found.where(is_seen, 0), expected.where(is_seen, 0)) < limit


def test_dense_calls() -> None:
    """Arguments by position, and the number of columns by a keyword."""
    kwargs = make_dense(6, 40, 32, 64, "any")("cpu")
    q, kv, weights, *windows = (
        kwargs[name] for name in ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
    )
    expected = reference.fp8_fp4_mqa_logits(q, kv, weights, *windows)
    assert torch.equal(deep_gemm.fp8_mqa_logits(q[0], kv, weights, *windows), expected)
    assert torch.equal(deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, *windows, True, 0, F32), expected)
    cut = deep_gemm.fp8_mqa_logits(q[0], kv, weights, *windows, clean_logits=False, max_seqlen_k=33)
    assert cut.shape == (6, 33)


def test_paged_calls() -> None:
    """A cache of four dimensions, whose blocks are used in any order."""
    kwargs = make_paged((70, 5), 2, 32, 64, gap=0)("cpu")
    q, lengths, table = kwargs["q"][0], kwargs["context_lens"], kwargs["block_table"]
    assert kwargs["kv_cache"].shape[1:] == (64, 1, 68)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132)
    operands = q, kwargs["kv_cache"], kwargs["weights"], lengths, table, schedule, 128
    scores = deep_gemm.fp8_paged_mqa_logits(*operands, clean_logits=False)
    assert scores.shape == (4, 128)
    assert (scores.isfinite().sum(dim=1) == lengths.clamp(min=0).view(-1)).all()


def peer() -> Any:
    """DeepGEMM, or None."""
    return importlib.import_module("deep_gemm") if importlib.util.find_spec("deep_gemm") else None


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize(("sizes", "shape", "window", "is_compressed", "dtype"), sampled(DENSE, 72))
def test_gpu_dense(
    sizes: tuple[int, int], shape: tuple[int, int], window: str, is_compressed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    (num_rows, num_keys), (num_heads, dim) = sizes, shape
    max_seqlen = num_keys if is_compressed else 0
    kwargs = make_dense(num_rows, num_keys, num_heads, dim, window, dtype=dtype, max_seqlen=max_seqlen)("cuda")
    kwargs["clean_logits"] = not is_compressed
    found = deep_gemm.fp8_fp4_mqa_logits(**kwargs)
    starts, ends = (kwargs[name].clamp(0, num_keys)[:, None] for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"))
    column = torch.arange(num_keys, device="cuda")
    is_seen = column < ends - starts if is_compressed else (column >= starts) & (column < ends)
    if not is_compressed:
        assert torch.equal(found.isneginf(), ~is_seen)
    assert_scores(found, reference.fp8_fp4_mqa_logits(**kwargs), is_seen, 1e-7 if dtype is F32 else 3e-6)
    if (theirs := peer()) is not None:
        assert_scores(found, theirs.fp8_fp4_mqa_logits(**kwargs), is_seen, 1e-6 if dtype is F32 else 1e-5)


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize(("sizes", "shape", "next_n", "kind", "dtype"), sampled(PAGED, 144))
def test_gpu_paged(sizes: tuple[int, int], shape: tuple[int, int], next_n: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = lengths_of(kind, *sizes)
    kwargs = make_paged(lengths, next_n, *shape, dtype=dtype, gap=0, clean=False)("cuda")
    seen = kwargs["context_lens"].clamp_(1, max(lengths))
    kwargs["schedule_meta"] = deep_gemm.get_paged_mqa_logits_metadata(seen, 64, get_num_sms())
    found = deep_gemm.fp8_fp4_paged_mqa_logits(**kwargs)
    is_seen = torch.arange(max(lengths), device="cuda") < seen.view(-1, 1)
    assert_scores(found, reference.fp8_fp4_paged_mqa_logits(**kwargs), is_seen, 1e-7 if dtype is F32 else 3e-6)
    if (theirs := peer()) is not None:
        schedule = theirs.get_paged_mqa_logits_metadata(seen, 64, theirs.get_num_sms())
        expected = theirs.fp8_fp4_paged_mqa_logits(**{**kwargs, "schedule_meta": schedule})
        assert_scores(found, expected, is_seen, 1e-6 if dtype is F32 else 1e-5)
