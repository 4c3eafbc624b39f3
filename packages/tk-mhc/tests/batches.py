"""A check for ops whose result for a token depends only on that token."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import assert_equal
from tk_core.testing.trees import map_tensors

TOKENS_ALONE = (0, 1, 77, 4095, 8191)
"""Tokens of a batch of 8192 that are also computed alone."""
BATCH_SIZES = (2, 63, 65, 129, 1000, 4096)
"""Other numbers of tokens: kernels take different launch shapes for few and for many."""


def assert_independent_of_batch(
    op: Callable[..., Any],
    inputs: dict[str, Any],
    token_dims: Mapping[str, int],
    *,
    output_token_dim: int = 0,
    num_random: int = 8,
) -> None:
    """Raise AssertionError unless each part of a batch of 8192 tokens has the same bits as within the whole batch.

    `token_dims`: the arguments with a dimension of tokens, and which it is. The parts are single tokens, the first n
    tokens for `BATCH_SIZES`, and `num_random` random ranges.
    """
    whole = op(**inputs)
    draws = random.Random(0)
    parts = [(token, 1) for token in TOKENS_ALONE] + [(0, num_tokens) for num_tokens in BATCH_SIZES]
    for _ in range(num_random):
        num_tokens = draws.randint(1, 8191)
        parts.append((draws.randint(0, 8192 - num_tokens), num_tokens))
    for first, num_tokens in parts:

        def part(x: Tensor, dim: int, first: int = first, num_tokens: int = num_tokens) -> Tensor:
            return x.narrow(dim, first, num_tokens).clone(memory_format=torch.contiguous_format)

        given = {name: part(inputs[name], dim) for name, dim in token_dims.items() if inputs[name] is not None}
        expected = map_tensors(lambda x, part=part: part(x, output_token_dim), whole)
        assert_equal(op(**{**inputs, **given}), expected, name=f"tokens {first} to {first + num_tokens - 1}")
