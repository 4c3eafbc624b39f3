"""Tensors of more than 2³¹ elements: the first and last tokens come out as they do alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import assert_equal
from tk_core.testing.trees import map_tensors, tensors

from .mixes import test_mhc_pre_split_mixes as mhc_pre_split_mixes
from .post import test_mhc_multilayer_recompute as mhc_multilayer_recompute
from .post import test_mhc_post as mhc_post
from .post import test_mhc_post_bwd as mhc_post_bwd

SAMPLE = 9
STREAMS = 2**31 // (8 * 8192) + SAMPLE
"""Tokens whose streams have more than 2³¹ elements."""

pytestmark = pytest.mark.gpu(gib=20)


def _assert_ends(op: Callable[..., Any], inputs: dict[str, Any], num_tokens: int) -> None:
    """Compare the first and last tokens of op's results with those of these tokens alone."""

    def part(tree: Any, end: bool) -> Any:
        def of_tokens(x: Tensor) -> Tensor:
            return (x[-SAMPLE:] if end else x[:SAMPLE]).clone() if len(x) == num_tokens else x

        return map_tensors(of_tokens, tree)

    alone = [op(**part(inputs, end)) for end in (False, True)]
    whole = op(**inputs)
    for end in (False, True):
        assert_equal(tensors(part((whole,), end)), tensors((alone[end],)))


def _recompute(**inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    tk_mhc.mhc_multilayer_recompute(**inputs)
    return inputs["layer_input_list"], inputs["residual_list"]


def test_post() -> None:
    _assert_ends(tk_mhc.mhc_post, mhc_post.make((STREAMS,), 8, 8192)("cuda"), STREAMS)


def test_post_bwd() -> None:
    _assert_ends(tk_mhc.mhc_post_bwd, mhc_post_bwd.make((STREAMS,), 8, 8192)("cuda"), STREAMS)


def test_recompute() -> None:
    _assert_ends(_recompute, mhc_multilayer_recompute.make((STREAMS,), 8, 8192, 2, 1)("cuda"), STREAMS)


@pytest.mark.gpu(gib=28)
def test_mixes() -> None:
    num_tokens = 2**31 // 80 + SAMPLE
    inputs = mhc_pre_split_mixes.make((num_tokens,), 8)("cuda")
    _assert_ends(tk_mhc.mhc_pre_split_mixes, inputs, num_tokens)


def test_sinkhorn() -> None:
    num_tokens = 2**31 // 64 + SAMPLE
    x = torch.randn(num_tokens, 8, 8, device="cuda")
    _assert_ends(tk_mhc.sinkhorn_normalize, {"x": x, "repeat": 2, "eps": 1e-6}, num_tokens)
