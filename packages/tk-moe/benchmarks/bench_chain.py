"""Gate → map → expand as one CUDA graph, against the same in PyTorch under torch.compile, also as one CUDA graph.

Hidden 7168, 256 experts, top 8, bfloat16. Segments are multiples of 16 rows up to 128 tokens, as in decoding, and of
128 beyond. There are as many rows as any routing may need: those without a token are filled with zeros.
"""

from collections.abc import Callable

import pytest
import torch

import tk_moe
from tk_core.testing.bench import Bench
from tk_core.testing.trees import distinct_bytes

HIDDEN, NUM_EXPERTS, NUM_TOPK = 7168, 256, 8
NUM_TOKENS = (1, 8, 64, 128, 1024, 8192)

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def alignment_of(num_tokens: int) -> int:
    return 16 if num_tokens <= 128 else 128


def chain(scores: torch.Tensor, x: torch.Tensor, num_rows: int, alignment: int) -> Outputs:
    """Three launches of ours."""
    topk_idx = tk_moe.topk_gate(scores, NUM_TOPK)
    pos_to_expert, _, _, token_topk_to_pos, *_ = tk_moe.get_fused_mapping(topk_idx, NUM_EXPERTS, num_rows, alignment)
    return topk_idx, token_topk_to_pos, pos_to_expert, tk_moe.expand_to_fused(x, token_topk_to_pos, pos_to_expert)


def chain_in_torch(scores: torch.Tensor, x: torch.Tensor, num_rows: int, alignment: int) -> Outputs:
    """The same as PyTorch's users write it: topk, a stable sort, scatters, a gather."""
    topk_idx = scores.topk(NUM_TOPK).indices
    experts = topk_idx.flatten()
    pairs = torch.arange(experts.numel(), device=experts.device)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device=experts.device)
    counts = counts.scatter_add(0, experts, torch.ones_like(experts))
    sizes = (counts + alignment - 1) // alignment * alignment
    order = experts.argsort(stable=True)
    rank = torch.empty_like(pairs).scatter(0, order, pairs) - (counts.cumsum(0) - counts)[experts]
    pos = (sizes.cumsum(0) - sizes)[experts] + rank
    none = torch.full((num_rows,), -1, dtype=torch.int64, device=experts.device)
    pos_to_expert, pos_to_token = none.scatter(0, pos, experts), none.scatter(0, pos, pairs // NUM_TOPK)
    rows = torch.where(pos_to_token[:, None] >= 0, x[pos_to_token.clamp(min=0)], 0)
    return topk_idx, pos.view(topk_idx.shape).int(), pos_to_expert.int(), rows


def as_graph(function: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The launches of a call as one CUDA graph, and the outputs that its replays write."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@pytest.mark.bench
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_bench(num_tokens: int, tk_bench: Bench, request: pytest.FixtureRequest) -> None:
    # No two scores of a token are equal, so that any order of equals is right.
    scores = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").argsort(1).float()
    x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    alignment = alignment_of(num_tokens)
    num_rows = tk_moe.max_expanded_tokens(num_tokens, NUM_TOPK, NUM_EXPERTS, alignment)
    compiled = torch.compile(chain_in_torch, fullgraph=True, dynamic=False)
    ours, outputs = as_graph(lambda: chain(scores, x, num_rows, alignment))
    theirs, expected = as_graph(lambda: compiled(scores, x, num_rows, alignment))
    ours.replay()
    theirs.replay()
    for name, actual, wanted in zip(("topk_idx", "token_topk_to_pos", "pos_to_expert", "rows"), outputs, expected):
        assert torch.equal(actual, wanted), f"{name}: expected the same from both chains"
    row = tk_bench.measure_latencies(
        "tk_moe.gate_map_expand",
        f"{num_tokens} token{'s' if num_tokens > 1 else ''}, segments of {alignment}",
        distinct_bytes(((scores, x), outputs)),
        ours.replay,
        theirs.replay,
    )
    request.node.user_properties.append(("tk_bench", row))
