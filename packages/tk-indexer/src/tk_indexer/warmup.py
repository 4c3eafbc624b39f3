"""The calls that a model makes to this package's ops; `tk warmup` compiles the kernels they need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

import tk_indexer
from tk_core.cli.profile import Call, call, empty


@dataclass(frozen=True)
class Profile:
    """Section [tk_indexer] of a model's profile."""

    index_topk: int
    """Keys that are selected for a query."""
    max_keys: int
    """The most keys, columns of the scores, that a query is scored against."""
    logits: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """Dtypes of the scores."""
    index_heads: int = 64
    """Heads of an index query."""
    index_dim: int = 128
    """Channels of a head, and of a key."""
    operands: tuple[Literal["e4m3"], ...] = ("e4m3",)
    """Dtypes of index queries and keys; without any, no scores are computed."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    powers = [1 << bit for bit in range(profile.max_keys.bit_length())]
    for dtype in profile.logits:
        for num_keys in (*powers, profile.max_keys):
            yield call(tk_indexer.topk_indices, empty(num_tokens, num_keys, dtype=dtype), profile.index_topk)
    for dtype in profile.logits if "e4m3" in profile.operands else ():
        q, k = (
            empty(*shape, profile.index_dim, dtype=torch.float8_e4m3fn)
            for shape in ((num_tokens, profile.index_heads), (profile.max_keys,))
        )
        window = empty(num_tokens, dtype=torch.int32)
        operands = (q, None), (k, empty(profile.max_keys)), empty(num_tokens, profile.index_heads)
        dtype = getattr(torch, dtype)
        yield call(tk_indexer.fp8_fp4_mqa_logits, *operands, window, window, logits_dtype=dtype)
