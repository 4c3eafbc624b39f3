"""Named cases of top2_sum_gate, and the comparison of its results with the reference's."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tk_core.testing import Case, OpSpec, assert_equal
from tk_moe import reference
from tk_moe.gate.top2_sum_gate import top2_sum_gate
from tk_moe.lib.scoring import ScoringFunc
from tk_moe.reference.gate.top2_sum_gate import biased_ranks, without_other_groups
from tk_moe.reference.gate.topk_gate import topk_gate

Make = Callable[[str], dict[str, Any]]

# The order of ranks that differ by no more than this is unspecified.
_TOLERANCE = 2e-6

# Logits: sums of two of their scores, each with a bias of _BIASES, are either equal or far apart.
_VALUES = (-1.3, -0.4, 0.5, 1.9)
_BIASES = (0.0, 0.13)
_EXTREMES = (
    *(float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38),
    *(88.0, -88.0, 104.0, -104.0, 20.0, 20.000002, -20.0, 1.0, -1.0),
)


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    groups: tuple[int, int] = (0, 0),
    scoring_func: ScoringFunc = ScoringFunc.SIGMOID,
    *,
    values: str = "normal",
    mask: bool = False,
    fixed: bool = False,
    num_shared: int = 0,
    num_extra: int | None = None,
    unmapped: str = "",
    ep: tuple[int, int] = (0, 1),
    tp: tuple[int, int] = (0, 1),
    first_element: int = 0,
) -> Make:
    """Inputs of top2_sum_gate.

    Values: "normal" with a small bias, "ties" (of 4 values, with one of 2 biases), "equal", "extremes", "none" (a bias
    of -∞ everywhere), "low" (60 lower: sums of sigmoids below 1e-20). groups: (kept, all). ep and tp: (rank, ranks).
    unmapped: "", "contiguous" or "strided". The logits start at element `first_element` of their storage.
    """

    def draw(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_tokens, num_experts)
        if device == "meta":
            return torch.empty(shape, device=device), torch.empty(num_experts, device=device)
        if values == "ties":
            logits = torch.tensor(_VALUES, device=device)[torch.randint(0, 4, shape, device=device)]
            return logits, torch.tensor(_BIASES, device=device)[torch.randint(0, 2, (num_experts,), device=device)]
        bias = torch.randn(num_experts, device=device) * 0.1
        if values == "equal":
            return torch.zeros(shape, device=device), torch.zeros_like(bias)
        if values == "extremes":
            picked = torch.randint(0, len(_EXTREMES), shape, device=device)
            return torch.tensor(_EXTREMES, device=device)[picked], bias
        if values == "none":
            return torch.randn(shape, device=device), torch.full_like(bias, -torch.inf)
        return torch.randn(shape, device=device) - (60 if values == "low" else 0), bias

    def build(device: str) -> dict[str, Any]:
        logits, bias = draw(device)
        if first_element:
            storage = torch.empty(first_element + num_tokens * num_experts, device=device)
            logits = storage[first_element:].view(logits.shape).copy_(logits)
        inputs: dict[str, Any] = {"logits": logits, "bias": bias, "num_topk": num_topk}
        inputs |= {"num_topk_groups": groups[0], "num_groups": groups[1]}
        inputs |= {"use_shared_as_routed": num_shared > 0, "num_shared_experts": num_shared}
        inputs |= {"routed_scaling_factor": 2.5, "ep_rank": ep[0], "num_ep_ranks": ep[1]}
        inputs |= {"tp_rank": tp[0], "num_tp_ranks": tp[1], "scoring_func": scoring_func}
        inputs["mask"] = torch.rand(num_tokens, device=device) < 0.8 if mask else None
        inputs["fix_routing_mask"] = torch.rand(num_tokens, device=device) < 0.3 if fixed else None
        inputs |= {"to_physical_map": None, "logical_count": None, "unmapped_topk_idx": None}
        if num_extra is not None:
            num_logical = num_experts + num_shared
            shape = (num_logical, 1 + num_extra)
            count = torch.randint(1, 2 + num_extra, (num_logical,), dtype=torch.int32, device=device)
            physical = torch.randint(0, num_experts + num_extra, shape, dtype=torch.int32, device=device)
            inputs |= {"to_physical_map": physical, "logical_count": count}
        if unmapped:
            # Experts, some negative; overwritten where the routing is not given.
            width = num_topk + (3 if unmapped == "strided" else 0)
            given = torch.randint(0, num_experts, (num_tokens, width), device=device)
            given = torch.where(torch.rand(given.shape, device=device) < 0.1, -7, given)
            inputs["unmapped_topk_idx"] = given[:, :num_topk]
        return inputs

    return build


# ---- comparison


def _same_rank(x: float, y: float) -> bool:
    return x == y or abs(x - y) <= _TOLERANCE or (x != x and y != y)


def _possible_groups(ranks: torch.Tensor, selection: list[int], num_kept: int, num_groups: int) -> Iterator[list[int]]:
    """Sets of groups that may have been kept: those with the best sums, any of nearly equal ones, and `selection`'s."""
    rows = ranks.view(num_groups, -1)
    best = rows.gather(1, topk_gate(rows, 2))
    sums = best[:, 0] + best[:, 1]
    least = sums[topk_gate(sums[None], num_kept)[0, -1]].item()
    places = topk_gate(sums[None], num_groups)[0].tolist()
    open_groups = [g for g in places if _same_rank(sums[g].item(), least)]
    sure = [g for g in places[:num_kept] if g not in open_groups]
    needed = {expert // rows.shape[1] for expert in selection} - {*sure}
    rest = [g for g in open_groups if g not in needed]
    num_missing = num_kept - len(sure) - len(needed)
    if num_missing >= 0 and needed <= {*open_groups}:
        for more in itertools.combinations(rest, num_missing):
            yield [*sure, *sorted(needed), *more]


def assert_selection(ranks: torch.Tensor, selection: list[int], num_kept: int, num_groups: int) -> None:
    """Raise AssertionError unless a token with these ranks (num_experts) may select these experts, best first.

    The experts must be distinct. The rank in each slot must be within 2e-6 of the rank there when ranks are sorted, in
    groups that may be kept if sums within 2e-6 of each other count as equal. Where all ranks (and sums) that compete
    differ by more, only the reference's selection passes.
    """
    num_experts, num_topk = ranks.numel(), len(selection)
    assert all(0 <= expert < num_experts for expert in selection), f"no expert: {selection}"
    assert len({*selection}) == num_topk, f"an expert twice: {selection}"
    candidates = [ranks]
    if num_groups != num_kept:
        kept = torch.tensor(list(_possible_groups(ranks, selection, num_kept, num_groups)), device=ranks.device)
        candidates = [without_other_groups(ranks[None], one[None], num_groups)[0] for one in kept.long()]
    for candidate in candidates:
        best = candidate[topk_gate(candidate[None], num_topk)[0]].tolist()
        if all(_same_rank(x, y) for x, y in zip(candidate[selection].tolist(), best)):
            return
    raise AssertionError(f"selected {selection} with ranks {ranks[selection].tolist()}, not the best")


_INPUTS = (
    *("logits", "bias", "num_topk", "num_topk_groups", "num_groups", "use_shared_as_routed", "num_shared_experts"),
    *("routed_scaling_factor", "ep_rank", "num_ep_ranks", "tp_rank", "num_tp_ranks", "scoring_func"),
    *("mask", "fix_routing_mask", "to_physical_map", "logical_count"),
)


def compare(actual: Any, expected: Any) -> None:
    """Indices must pass `assert_selection`; weights must be those of the selection within rtol 1e-5, atol 1e-8.

    Both arguments are the result, unmapped_topk_idx and all the inputs, of which none may have changed.
    """
    (indices, weights), unmapped, *inputs = actual
    (expected_indices, expected_weights), expected_unmapped, *_ = expected
    for name, value, before in zip(_INPUTS, inputs, expected[2:], strict=True):
        assert_equal(value, before, name=name)
    kwargs = dict(zip(_INPUTS, inputs, strict=True))
    # Logical experts: the reference's selection, and the actual one where it can be inferred.
    selection = torch.full_like(expected_indices[:, : kwargs["num_topk"]], -1)
    reference.top2_sum_gate(**_given(kwargs, fix=False), unmapped_topk_idx=selection)
    if unmapped is not None:
        own = unmapped
        if kwargs["fix_routing_mask"] is not None:
            fixed = kwargs["fix_routing_mask"]
            assert_equal(own[fixed], expected_unmapped[fixed], name="unmapped_topk_idx of given routing")
            selection = torch.where(fixed[:, None], expected_unmapped, selection)
        assert torch.equal(selection, expected_unmapped), "the reference's selection depends on more than its inputs"
    elif kwargs["to_physical_map"] is None and kwargs["num_tp_ranks"] == 1:
        own = indices[:, : kwargs["num_topk"]]
    else:
        own = selection

    other = (own != selection).any(dim=1)
    if bool(other.any()):
        if kwargs["mask"] is not None:
            assert bool((~other | kwargs["mask"]).all()), "indices in a row that mask leaves out"
        rows = other.nonzero()[:, 0]
        ranks = biased_ranks(kwargs["logits"][rows], kwargs["bias"], kwargs["scoring_func"])
        for row, row_ranks, experts in zip(rows.tolist(), ranks, own[rows].tolist()):
            try:
                assert_selection(row_ranks, experts, kwargs["num_topk_groups"], kwargs["num_groups"])
            except AssertionError as error:
                raise AssertionError(f"token {row}: {error}; expected {selection[row].tolist()}") from None
        # The reference's indices and weights for this selection.
        given = own.contiguous().clone()
        expected_indices, expected_weights = reference.top2_sum_gate(**_given(kwargs, True), unmapped_topk_idx=given)
    assert_equal(indices, expected_indices, name="topk_idx")
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-8, equal_nan=True)


def _given(kwargs: dict[str, Any], fix: bool) -> dict[str, Any]:
    """The arguments with a routing that is given for all tokens (`fix`), or for none."""
    logits = kwargs["logits"]
    fixed = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device) if fix else None
    return {**kwargs, "fix_routing_mask": fixed}


# ---- cases

SIGMOID, SQRTSOFTPLUS, SOFTMAX = ScoringFunc.SIGMOID, ScoringFunc.SQRTSOFTPLUS, ScoringFunc.SOFTMAX
_EVERYTHING: dict[str, Any] = {"mask": True, "fixed": True, "num_extra": 8, "unmapped": "strided"}

SPEC = OpSpec(
    op=top2_sum_gate,
    reference=reference.top2_sum_gate,
    compare=compare,
    # The inputs are listed only for `compare`, which checks that they are unchanged.
    mutates=("unmapped_topk_idx", *_INPUTS),
    cases=(
        Case("e256-g4of8-k8-t9", make(9, 256, 8, (4, 8)), small=True, modes=True, compile=True),
        Case("e256-g8of8-k8-t9-ties", make(9, 256, 8, (8, 8), values="ties"), small=True, compile=True),
        Case("e72-k6-t17-sqrtsoftplus", make(17, 72, 6, (0, 0), SQRTSOFTPLUS), small=True, compile=True),
        Case("e128-g2of4-k8-t5-softmax", make(5, 128, 8, (2, 4), SOFTMAX), small=True, compile=True),
        Case("e36-g1of3-k2-t7", make(7, 36, 2, (1, 3)), small=True, compile=True),
        Case("e13-k13-t3-softmax", make(3, 13, 13, (0, 0), SOFTMAX), small=True, compile=True),
        Case("e1-k1-t3", make(3, 1, 1), small=True),
        Case("e64-g31of32-k32-t3", make(3, 64, 32, (31, 32)), small=True, compile=True),
        Case("e1020-g9of17-k32-t3-ties", make(3, 1020, 32, (9, 17), values="ties"), small=True, compile=True),
        Case("e256-g4of8-k8-t0", make(0, 256, 8, (4, 8), **_EVERYTHING), small=True),
        Case("e256-g4of8-k8-t1", make(1, 256, 8, (4, 8)), small=True),
        Case("e256-g4of8-k8-t5-unaligned", make(5, 256, 8, (4, 8), first_element=1), small=True, compile=True),
        *(
            Case(f"e64-g2of4-k6-t9-{name}-{values}", make(9, 64, 6, (2, 4), scoring_func, values=values), small=True)
            for name, scoring_func in (("sigmoid", SIGMOID), ("sqrtsoftplus", SQRTSOFTPLUS), ("softmax", SOFTMAX))
            for values in ("ties", "equal", "extremes", "none", "low")
        ),
        Case("e64-k6-t9-mask", make(9, 64, 6, mask=True), small=True),
        Case("e64-k6-t9-unmapped", make(9, 64, 6, unmapped="contiguous"), small=True),
        Case("e64-k6-t9-mask-unmapped", make(9, 64, 6, mask=True, unmapped="strided"), small=True),
        Case("e64-k6-t9-fixed", make(9, 64, 6, fixed=True, unmapped="contiguous"), small=True, compile=True),
        Case("e64-k6-t9-fixed-softmax", make(9, 64, 6, (2, 4), SOFTMAX, fixed=True, unmapped="strided"), small=True),
        Case("e64-k6-t9-map", make(9, 64, 6, num_extra=0, values="ties"), small=True),
        Case("e64-k6-t9-map-x5", make(9, 64, 6, num_extra=5, ep=(3, 4), unmapped="strided"), small=True),
        Case("e64-k6-t9-tp", make(9, 64, 6, values="ties", ep=(0, 8), tp=(1, 2)), small=True, compile=True),
        *(
            Case(
                f"e64-g2of4-k8-t9-shared{num_shared}-everything",
                make(9, 64, 8, (2, 4), num_shared=num_shared, ep=(5, 8), tp=(3, 4), **_EVERYTHING),
                small=True,
                modes=num_shared == 1,
                compile=True,
            )
            for num_shared in (1, 2)
        ),
        *(
            Case(
                f"e{num_experts}-k{num_topk}-t{num_tokens}-ties", make(num_tokens, num_experts, num_topk, values="ties")
            )
            for num_experts, num_topk, num_tokens in (
                *((8, 1, 2), (16, 2, 31), (32, 6, 4001), (36, 7, 31), (64, 6, 8001), (72, 6, 4001), (96, 9, 31)),
                *((108, 8, 4001), (144, 9, 4001), (256, 8, 8001), (288, 8, 31), (384, 8, 8001), (512, 9, 4001)),
            )
        ),
        *(
            Case(
                f"e{num_experts}-g{kept}of{groups}-k{num_topk}-t4001-{values}-{scoring_func}",
                make(4001, num_experts, num_topk, (kept, groups), scoring_func, values=values),
            )
            for num_experts, kept, groups, num_topk, values, scoring_func in (
                *(
                    (256, 4, 8, 8, "normal", SIGMOID),
                    (256, 4, 8, 8, "ties", SIGMOID),
                    (256, 4, 8, 8, "extremes", SIGMOID),
                ),
                *((256, 4, 8, 8, "equal", SIGMOID), (256, 4, 8, 8, "none", SIGMOID), (256, 4, 8, 8, "low", SIGMOID)),
                *((256, 4, 8, 8, "normal", SQRTSOFTPLUS), (256, 4, 8, 8, "normal", SOFTMAX)),
                *((256, 4, 8, 8, "extremes", SQRTSOFTPLUS), (256, 4, 8, 8, "extremes", SOFTMAX)),
                *(
                    (288, 3, 6, 7, "normal", SIGMOID),
                    (144, 2, 12, 9, "normal", SIGMOID),
                    (512, 5, 16, 9, "ties", SIGMOID),
                ),
                *(
                    (160, 3, 8, 6, "normal", SOFTMAX),
                    (384, 1, 2, 8, "normal", SQRTSOFTPLUS),
                    (96, 1, 32, 2, "ties", SIGMOID),
                ),
            )
        ),
        Case(
            "e256-g4of8-k8-t8001-shared1-everything",
            make(8001, 256, 8, (4, 8), num_shared=1, ep=(7, 8), tp=(1, 2), **_EVERYTHING),
        ),
        # t * 23333 exceeds 2^31.
        Case("e8-k2-t100003-map", make(100003, 8, 2, num_extra=6, ep=(1, 2), unmapped="contiguous")),
        *(
            Case(
                f"e256-g4of8-k8-t{num_tokens}-bench",
                make(num_tokens, 256, 8, (4, 8)),
                bench=True,
                model_shape=num_tokens in (128, 8192),
                gpu=False,
            )
            for num_tokens in (1, 8, 64, 128, 1024, 8192)
        ),
        *(
            Case(f"{name}-t8192-bench", made, bench=True, gpu=False)
            for name, made in (
                ("e64-k6", make(8192, 64, 6)),
                ("e128-k8-softmax", make(8192, 128, 8, (0, 0), SOFTMAX)),
                ("e256-g4of8-k8-sqrtsoftplus", make(8192, 256, 8, (4, 8), SQRTSOFTPLUS)),
                ("e256-k8", make(8192, 256, 8)),
                ("e384-k8", make(8192, 384, 8)),
                (
                    "e256-g4of8-k8-everything",
                    make(8192, 256, 8, (4, 8), num_shared=1, tp=(1, 2), ep=(1, 8), **_EVERYTHING),
                ),
            )
        ),
    ),
)
