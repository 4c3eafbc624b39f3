"""Speed of tk-indexer's ops, beside torch.topk."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import load_specs
from tk_core.testing.bench import benchmarks
from tk_core.testing.specs import Call


def _topk(logits: Tensor, k: int, **_: Any) -> Call:
    """The k largest in any order, with values; equal ones are chosen as they come."""
    return partial(torch.topk, logits, k, sorted=False)


test_bench = benchmarks(load_specs("tk_indexer"), {"tk_indexer.topk_indices": {"topk": _topk}})
