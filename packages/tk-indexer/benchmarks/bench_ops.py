"""Speed of tk-indexer's ops, beside torch.topk, and DeepGEMM where it is installed."""

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import load_specs
from tk_core.testing.bench import benchmarks
from tk_core.testing.specs import Call, Peer


def _topk(logits: Tensor, k: int, **_: Any) -> Call:
    """The k largest in any order, with values; equal ones are chosen as they come."""
    return partial(torch.topk, logits, k, sorted=False)


def _deep_gemm() -> dict[str, Peer]:
    """DeepGEMM's scores; it cleans them in a second kernel, and has no 16 heads and no max_seqlen_k with cleaning."""

    def peer(q: Any, kv: Any, weights: Tensor, logits_dtype: torch.dtype, max_seqlen_k: int, **windows: Tensor) -> Call:
        import deep_gemm

        bounds = windows["cu_seq_len_k_start"], windows["cu_seq_len_k_end"]
        options = {"clean_logits": True, "max_seqlen_k": max_seqlen_k, "logits_dtype": logits_dtype}
        return partial(deep_gemm.fp8_fp4_mqa_logits, q, kv, weights, *bounds, **options)

    return {"deep_gemm": peer} if importlib.util.find_spec("deep_gemm") else {}


PEERS = {"tk_indexer.topk_indices": {"topk": _topk}, "tk_indexer.fp8_fp4_mqa_logits": _deep_gemm()}

test_bench = benchmarks(load_specs("tk_indexer"), PEERS)
