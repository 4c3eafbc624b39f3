"""The cost of skewed routing: each op at its largest model shape with even, half and Zipf routing.

`half`: one expert is among the choices of half of all tokens, the others share the rest evenly. `zipf`: the n-th of the
experts in a random order is drawn with weight 1 / n, without replacement. `zipf-sorted`: the order is that of their
indices, so that the favourites are neighbours, which is the worst for the gates: few lanes of a warp hold them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tk_core.testing import Case, Make, OpSpec
from tk_core.testing.bench import Bench
from tk_core.testing.specs import load_specs
from tk_core.testing.trees import tensors
from tk_moe.mapping.get_fused_mapping import get_fused_mapping

NUM_EXPERTS, ALIGNMENT = 256, 16
ROUTINGS = ("even", "half", "zipf", "zipf-sorted")


def logits_of(num_tokens: int, routing: str, device: str) -> torch.Tensor:
    """Logits, float32 (num_tokens, NUM_EXPERTS), the largest of which are a draw of experts without replacement."""
    logits = torch.empty(num_tokens, NUM_EXPERTS, device=device).exponential_().log().neg()
    if routing == "half":
        logits[:, 0] = torch.where(torch.rand(num_tokens, device=device) < 0.5, 50.0, -50.0)
    elif routing.startswith("zipf"):
        rank = torch.arange(1, NUM_EXPERTS + 1, device=device)
        logits -= (rank if routing == "zipf-sorted" else rank[torch.randperm(NUM_EXPERTS, device=device)]).log()
    return logits


def topk_idx_of(num_tokens: int, num_topk: int, routing: str, device: str) -> torch.Tensor:
    """int64 (num_tokens, num_topk): the experts that those logits choose."""
    return logits_of(num_tokens, routing, device).topk(num_topk).indices


def routed(kwargs: dict[str, Any], routing: str, device: str) -> dict[str, Any]:
    """The arguments of a case with logits, indices or maps of that routing in place of its own."""
    new: dict[str, Any] = {}
    for name in ("logits", "scores"):
        if name in kwargs:
            new[name] = logits_of(kwargs[name].shape[0], routing, device).to(kwargs[name].dtype)
    for name in ("topk_idx", "group_idx"):
        if name in kwargs:
            new[name] = topk_idx_of(*kwargs[name].shape, routing, device).to(kwargs[name].dtype)
    if "token_topk_to_pos" in kwargs:
        x = kwargs.get("pos_to_expert", kwargs.get("x", kwargs.get("grad_rows")))
        topk_idx = topk_idx_of(*kwargs["token_topk_to_pos"].shape, routing, device)
        new["pos_to_expert"], _, _, new["token_topk_to_pos"], *_ = get_fused_mapping(
            topk_idx, NUM_EXPERTS, x.shape[0], ALIGNMENT, force_no_sync=True
        )
    assert new, f"expected logits, indices or a map among {', '.join(kwargs)}"
    return kwargs | {name: value for name, value in new.items() if name in kwargs}


OPS = (
    *("topk_gate", "topk_gate_with_weights", "top2_sum_gate", "gate_weights_bwd", "aux_fi", "group_count"),
    *("get_fused_mapping", "expand_to_fused", "expand_to_fused_with_sf", "reduce_fused"),
    *("expand_to_fused_bwd", "reduce_fused_bwd"),
)


def largest_model_case(spec: OpSpec) -> Case:
    """Of the cases of real models, the one with the most tokens; the first of equals."""
    return max((case for case in spec.cases if case.bench and case.model_shape), key=num_rows)


def num_rows(case: Case) -> int:
    """Rows of the first tensor among the arguments."""
    return tensors(case.make("meta"))[0].shape[0]


def _make(case: Case, routing: str) -> Make:
    return lambda device: routed(case.make(device), routing, device)


@pytest.mark.bench
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("op", OPS)
def test_bench(op: str, routing: str, tk_bench: Bench, request: pytest.FixtureRequest) -> None:
    spec = load_specs("tk_moe")[f"tk_moe.{op}"]
    case = largest_model_case(spec)
    name = f"{case.name.removesuffix('-bench')}-routed-{routing}-bench"
    skewed = replace(case, name=name, make=_make(case, routing), model_shape=False)
    request.node.user_properties.append(("tk_bench", tk_bench.measure(spec, skewed)))
