"""max_expanded_tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_moe import get_fused_mapping, max_expanded_tokens


def rows_needed(topk_idx: torch.Tensor, num_experts: int, alignment: int) -> int:
    """Rows of all segments, from the mapping itself."""
    return int(get_fused_mapping(topk_idx, num_experts, 0, alignment, True)[5][-1])


def worst_routing(num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    """One pair for every expert, or for as many as there are pairs; the others for the first."""
    experts = torch.zeros(num_tokens * num_topk, dtype=torch.int64)
    count = min(num_experts, experts.numel())
    experts[:count] = torch.arange(count)
    return experts.view(num_tokens, num_topk)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4096, 8, 256, 128), 65280),  # 255 experts of one pair each: 255 · 128 rows, and 32513 pairs of one: 255 · 128
        ((1, 1, 256, 16), 16),
        ((2, 2, 256, 16), 64),
        ((3, 2, 4, 1), 6),
        ((5, 1, 1, 4), 8),
        ((0, 8, 256, 128), 0),
    ],
)
def test_by_hand(sizes: tuple[int, int, int, int], expected: int) -> None:
    assert max_expanded_tokens(*sizes) == expected


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_routing_needs_more_and_one_needs_as_much(data: Any) -> None:
    num_tokens, num_topk = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    num_experts, alignment = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    num_pairs = num_tokens * num_topk
    # -1 is a pair without an expert.
    experts = st.lists(st.integers(-1, num_experts - 1), min_size=num_pairs, max_size=num_pairs)
    topk_idx = torch.tensor(data.draw(experts)).view(num_tokens, num_topk)
    most = max_expanded_tokens(num_tokens, num_topk, num_experts, alignment)
    assert rows_needed(topk_idx, num_experts, alignment) <= most
    assert rows_needed(worst_routing(num_tokens, num_topk, num_experts), num_experts, alignment) == most


def test_one_graph_for_all_numbers_of_tokens() -> None:
    graphs = 0

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def rows(topk_idx: torch.Tensor) -> torch.Tensor:
        return topk_idx.new_empty((max_expanded_tokens(*topk_idx.shape, 64, 16),))

    # Fewer pairs than experts and more.
    for num_tokens in (3, 5, 60, 7):
        assert rows(torch.zeros(num_tokens, 4, dtype=torch.int64)).shape == (
            max_expanded_tokens(num_tokens, 4, 64, 16),
        )
    assert graphs == 1


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ((1.0, 8, 256, 16), TypeError, "num_tokens: expected an int"),
        ((-1, 8, 256, 16), ValueError, "num_tokens: expected at least 0, got -1"),
        ((4, 0, 256, 16), ValueError, "num_topk: expected at least 1, got 0"),
        ((4, True, 256, 16), TypeError, "num_topk: expected an int"),
        ((4, 8, 0, 16), ValueError, "num_experts: expected at least 1, got 0"),
        ((4, 8, 256, 0), ValueError, "alignment: expected at least 1, got 0"),
    ],
)
def test_bad_input(sizes: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        max_expanded_tokens(*sizes)
