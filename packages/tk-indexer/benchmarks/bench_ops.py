"""Speed of tk-indexer's ops, beside torch.topk, copies, and DeepGEMM and FlashInfer where they are installed."""

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import load_specs
from tk_core.testing.bench import benchmarks
from tk_core.testing.specs import Call, OpSpec, Peer

SPECS = load_specs("tk_indexer")


def _topk(logits: Tensor, k: int, **_: Any) -> Call:
    """The k largest in any order, with values; equal ones are chosen as they come."""
    return partial(torch.topk, logits, k, sorted=False)


def _ragged(logits: Tensor, k: int, **_: Any) -> Call:
    """FlashInfer's selection with the same rule for ties; its order is its own."""
    import flashinfer

    rows, cols = logits.shape
    lengths = torch.full((rows,), cols, dtype=torch.int32, device=logits.device)
    select = flashinfer.top_k_ragged_transform
    return partial(select, logits, torch.zeros_like(lengths), lengths, k, deterministic=True, tie_break=1)


def _copy_of(spec: OpSpec) -> Peer:
    """A copy that moves as many bytes as the op has to."""

    def peer(**kwargs: Any) -> Call:
        half = spec.bytes_of(kwargs, spec.op(**kwargs)) // 2
        source, target = torch.zeros(2, half, dtype=torch.uint8, device="cuda")
        return lambda: target.copy_(source)

    return peer


def _dense(
    q: Any, kv: Any, weights: Tensor, logits_dtype: torch.dtype, max_seqlen_k: int, *, clean: bool, **windows: Tensor
) -> Call:
    """DeepGEMM cleans scores in a second kernel, and has no 16 heads and no max_seqlen_k with cleaning.

    It writes behind a row where a window ends behind the last key, so windows are clamped before.
    """
    import deep_gemm

    bounds = (windows[name].clamp(0, len(kv[0])) for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"))
    options = {"clean_logits": clean, "max_seqlen_k": max_seqlen_k, "logits_dtype": logits_dtype}
    return partial(deep_gemm.fp8_fp4_mqa_logits, q, kv, weights, *bounds, **options)


def _paged(q: Any, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, **more: Any) -> Call:
    """DeepGEMM takes two queries of a sequence at most: more are several calls. It does not clean."""
    import deep_gemm

    (num_seqs, next_n), most = context_lens.shape, more["max_context_len"]
    cache = kv_cache.unsqueeze(2) if kv_cache.ndim == 3 else kv_cache
    of_seq = weights.view(num_seqs, next_n, -1)
    calls = []
    for first in range(0, next_n, 2):
        part = slice(first, first + 2)
        lengths = context_lens[:, part].contiguous()
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, cache.shape[1], deep_gemm.get_num_sms())
        queries = tuple(x if x is None else x[:, part].contiguous() for x in q)
        operands = queries, cache, of_seq[:, part].flatten(0, 1).contiguous(), lengths
        options = {"clean_logits": False, "logits_dtype": more["logits_dtype"]}
        calls.append(partial(deep_gemm.fp8_fp4_paged_mqa_logits, *operands, block_table, schedule, most, **options))
    return lambda: [call() for call in calls]


CASTS = ("indexer_k_quant_and_cache", "fused_indexer_q_rope_quant", "cp_gather_indexer_k_quant_cache")
PEERS: dict[str, dict[str, Peer]] = {
    "tk_indexer.topk_indices": {"topk": _topk},
    **{f"tk_indexer.{name}": {"copy_of_as_many_bytes": _copy_of(SPECS[f"tk_indexer.{name}"])} for name in CASTS},
}
if importlib.util.find_spec("flashinfer"):
    PEERS["tk_indexer.topk_indices"]["flashinfer"] = _ragged
if importlib.util.find_spec("deep_gemm"):
    PEERS["tk_indexer.fp8_fp4_mqa_logits"] = {
        "deep_gemm": partial(_dense, clean=True),
        "deep_gemm_uncleaned": partial(_dense, clean=False),
    }
    PEERS["tk_indexer.fp8_fp4_paged_mqa_logits"] = {"deep_gemm": _paged}

test_bench = benchmarks(SPECS, PEERS)
