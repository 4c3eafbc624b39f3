"""top2_sum_gate."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, assert_equal, empty, tiers
from tk_core.testing.trees import transfer
from tk_moe import ScoringFunc, reference
from tk_moe.reference.gate.gate import topk_gate
from tk_moe.reference.gate.top2_sum_gate import biased_ranks, without_other_groups

from ..models import benches

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
    renormalize: bool = True,
    num_topk_sum: int = 2,
) -> Make:
    """Inputs of top2_sum_gate.

    Values: "normal" with a small bias, "ties" (of 4 values, with one of 2 biases), "equal", "extremes", "none" (a bias
    of -∞ everywhere), "low" (60 lower: sums of sigmoids below 1e-20). groups: (kept, all). ep and tp: (rank, ranks).
    unmapped: "", "contiguous" or "strided". The logits start at element `first_element` of their storage.
    """

    def draw(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_tokens, num_experts)
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
            logits = empty(*logits.shape, device=device, first_element=first_element).copy_(logits)
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
        return {**inputs, "renormalize": renormalize, "num_topk_sum": num_topk_sum}

    return build


# ---- comparison


def _same_rank(x: float, y: float) -> bool:
    return x == y or abs(x - y) <= _TOLERANCE or (x != x and y != y)


def _possible_groups(
    ranks: torch.Tensor, selection: list[int], num_kept: int, num_groups: int, num_topk_sum: int
) -> Iterator[list[int]]:
    """Sets of groups that may have been kept: those with the best sums, any of nearly equal ones, and `selection`'s."""
    rows = ranks.view(num_groups, -1)
    sums = rows.gather(1, topk_gate(rows, num_topk_sum)).sum(dim=1)
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


def assert_selection(
    ranks: torch.Tensor, selection: list[int], num_kept: int, num_groups: int, num_topk_sum: int = 2
) -> None:
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
        possible = _possible_groups(ranks, selection, num_kept, num_groups, num_topk_sum)
        kept = torch.tensor(list(possible), device=ranks.device)
        candidates = [without_other_groups(ranks[None], one[None], num_groups)[0] for one in kept.long()]
    for candidate in candidates:
        best = candidate[topk_gate(candidate[None], num_topk)[0]].tolist()
        if all(_same_rank(x, y) for x, y in zip(candidate[selection].tolist(), best)):
            return
    raise AssertionError(f"selected {selection} with ranks {ranks[selection].tolist()}, not the best")


_INPUTS = (
    *("logits", "bias", "num_topk", "num_topk_groups", "num_groups", "use_shared_as_routed", "num_shared_experts"),
    *("routed_scaling_factor", "ep_rank", "num_ep_ranks", "tp_rank", "num_tp_ranks", "scoring_func"),
    *("mask", "fix_routing_mask", "to_physical_map", "logical_count", "renormalize", "num_topk_sum"),
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
                groups = kwargs["num_topk_groups"], kwargs["num_groups"], kwargs["num_topk_sum"]
                assert_selection(row_ranks, experts, *groups)
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
    op=tk_moe.top2_sum_gate,
    compare=compare,
    # The inputs are listed only for `compare`, which checks that they are unchanged.
    mutates=("unmapped_topk_idx", *_INPUTS),
    cases=(
        Case("e256-g4of8-k8-t9", make(9, 256, 8, (4, 8)), small=True, modes=True, compile=True),
        Case("e256-g8of8-k8-t9-ties", make(9, 256, 8, (8, 8), values="ties"), small=True),
        Case("e72-k6-t17-sqrtsoftplus", make(17, 72, 6, (0, 0), SQRTSOFTPLUS), small=True, compile=True),
        Case("e128-g2of4-k8-t5-softmax", make(5, 128, 8, (2, 4), SOFTMAX), small=True),
        Case("e36-g1of3-k2-t7", make(7, 36, 2, (1, 3)), small=True, compile=True),
        Case("e13-k13-t3-softmax", make(3, 13, 13, (0, 0), SOFTMAX), small=True, compile=True),
        Case("e1-k1-t3", make(3, 1, 1), small=True),
        Case("e64-g31of32-k32-t3", make(3, 64, 32, (31, 32)), small=True),
        Case("e1020-g9of17-k32-t3-ties", make(3, 1020, 32, (9, 17), values="ties"), small=True, compile=True),
        Case("e256-g4of8-k8-t0", make(0, 256, 8, (4, 8), **_EVERYTHING), small=True),
        Case("e256-g4of8-k8-t1", make(1, 256, 8, (4, 8)), small=True),
        Case("e256-g4of8-k8-t5-unaligned", make(5, 256, 8, (4, 8), first_element=1), small=True),
        *(
            Case(f"e64-g2of4-k6-t9-{name}-{values}", make(9, 64, 6, (2, 4), scoring_func, values=values), small=True)
            for name, scoring_func in (("sigmoid", SIGMOID), ("sqrtsoftplus", SQRTSOFTPLUS), ("softmax", SOFTMAX))
            for values in ("ties", "equal", "extremes", "none", "low")
        ),
        Case("e64-k6-t9-mask", make(9, 64, 6, mask=True), small=True),
        Case("e64-k6-t9-not-divided", make(9, 64, 6, renormalize=False), small=True, compile=True),
        Case("e160-g3of8-k6-t33-one", make(33, 160, 6, (3, 8), SOFTMAX, num_topk_sum=1), small=True, compile=True),
        Case("e32-g7of32-k5-t33-one", make(33, 32, 5, (7, 32), values="ties", num_topk_sum=1), small=True),
        Case("e64-k6-t9-unmapped", make(9, 64, 6, unmapped="contiguous"), small=True),
        Case("e64-k6-t9-mask-unmapped", make(9, 64, 6, mask=True, unmapped="strided"), small=True),
        Case("e64-k6-t9-fixed", make(9, 64, 6, fixed=True, unmapped="contiguous"), small=True),
        Case("e64-k6-t9-fixed-softmax", make(9, 64, 6, (2, 4), SOFTMAX, fixed=True, unmapped="strided"), small=True),
        Case("e64-k6-t9-map", make(9, 64, 6, num_extra=0, values="ties"), small=True),
        Case("e64-k6-t9-map-x5", make(9, 64, 6, num_extra=5, ep=(3, 4), unmapped="strided"), small=True),
        Case("e64-k6-t9-tp", make(9, 64, 6, values="ties", ep=(0, 8), tp=(1, 2)), small=True),
        *(
            Case(
                f"e64-g2of4-k8-t9-shared{num_shared}-everything",
                make(9, 64, 8, (2, 4), num_shared=num_shared, ep=(5, 8), tp=(3, 4), **_EVERYTHING),
                small=True,
                modes=num_shared == 1,
                compile=num_shared == 1,
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
                *((256, 4, 8, 8, each, SIGMOID) for each in ("normal", "ties", "extremes", "equal", "none", "low")),
                *(
                    (256, 4, 8, 8, each, function)
                    for function in (SQRTSOFTPLUS, SOFTMAX)
                    for each in ("normal", "extremes")
                ),
                *(
                    (288, 3, 6, 7, "normal", SIGMOID),
                    (144, 2, 12, 9, "normal", SIGMOID),
                    (96, 1, 32, 2, "ties", SIGMOID),
                ),
                *((160, 3, 8, 6, "normal", SOFTMAX), (384, 1, 2, 8, "normal", SQRTSOFTPLUS)),
                (512, 5, 16, 9, "ties", SIGMOID),
            )
        ),
        Case(
            "e256-g4of8-k8-t8001-shared1-everything",
            make(8001, 256, 8, (4, 8), num_shared=1, ep=(7, 8), tp=(1, 2), **_EVERYTHING),
        ),
        # t * 23333 exceeds 2^31.
        Case("e8-k2-t100003-map", make(100003, 8, 2, num_extra=6, ep=(1, 2), unmapped="contiguous")),
        *benches(
            "e256-g4of8-k8-t{}", lambda t: make(t, 256, 8, (4, 8)), (1, 8, 64, 128, 1024, 8192), models=(128, 8192)
        ),
        *benches("e{}-k{}-t8192", lambda e, k: make(8192, e, k), ((64, 6), (256, 8), (384, 8))),
        *benches("e128-k8-softmax-t{}", lambda t: make(t, 128, 8, (0, 0), SOFTMAX), (8192,)),
        *benches("e256-g4of8-k8-sqrtsoftplus-t{}", lambda t: make(t, 256, 8, (4, 8), SQRTSOFTPLUS), (8192,)),
        *benches(
            "e256-g4of8-k8-everything-t{}",
            lambda t: make(t, 256, 8, (4, 8), num_shared=1, tp=(1, 2), ep=(1, 8), **_EVERYTHING),
            (8192,),
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

INF, NAN = math.inf, math.nan


def route(logits: list[list[float]], bias: list[float] | None = None, num_topk: int = 2, **more: Any) -> Any:
    """The op, with all options off but those in `more`."""
    x = torch.tensor(logits)
    arguments: dict[str, Any] = {"num_topk_groups": 0, "num_groups": 0, "use_shared_as_routed": False}
    arguments |= {"num_shared_experts": 0, "routed_scaling_factor": 1.0, "ep_rank": 0, "num_ep_ranks": 1}
    arguments |= {"tp_rank": 0, "num_tp_ranks": 1, "scoring_func": SIGMOID}
    b = torch.zeros(x.shape[1]) if bias is None else torch.tensor(bias)
    return tk_moe.top2_sum_gate(x, b, num_topk, **(arguments | more))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


# ---- by hand

SCORES = [0.1, 0.4, 0.8, 0.2, 0.5, 0.6]


def test_weights_by_hand() -> None:
    idx, weights = route([[logit(p) for p in SCORES]], num_topk=3, routed_scaling_factor=1.9)
    assert idx.dtype == torch.int64
    assert idx.tolist() == [[2, 5, 4]]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 0.6, 0.5]]))


def test_weights_that_are_not_divided() -> None:
    _, weights = route([[logit(p) for p in SCORES]], num_topk=3, routed_scaling_factor=2.0, renormalize=False)
    torch.testing.assert_close(weights, torch.tensor([[1.6, 1.2, 1.0]]))


def test_bias_ranks_but_does_not_weigh() -> None:
    idx, weights = route([[logit(p) for p in SCORES]], [1.0, 0.0, 0.0, 0.0, 0.0, 0.25])
    assert idx.tolist() == [[0, 5]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.6]]) / 0.7)


def test_groups_by_hand() -> None:
    # Sums of the best two: 0.5, 1.0, 1.1 in pairs; 1.2, 1.1 in threes.
    logits = [[logit(p) for p in SCORES]]
    assert route(logits, num_groups=3, num_topk_groups=1)[0].tolist() == [[5, 4]]
    assert route(logits, num_groups=3, num_topk_groups=2, num_topk=3)[0].tolist() == [[2, 5, 4]]
    assert route(logits, num_groups=3, num_topk_groups=3)[0].tolist() == [[2, 5]]
    assert route(logits, num_groups=2, num_topk_groups=1, num_topk=3)[0].tolist() == [[2, 1, 0]]
    # By the best one, which is 0.4, 0.8, 0.6.
    assert route(logits, num_groups=3, num_topk_groups=1, num_topk_sum=1)[0].tolist() == [[2, 3]]
    assert route([[0.0, 1.0]], num_topk=1, num_groups=2, num_topk_groups=1, num_topk_sum=1)[0].tolist() == [[1]]


def test_ties_go_to_the_smaller_index() -> None:
    assert route([[0.0] * 8], num_topk=3)[0].tolist() == [[0, 1, 2]]
    assert route([[0.0] * 8], num_topk=3, num_groups=4, num_topk_groups=2)[0].tolist() == [[0, 1, 2]]
    assert route([[0.0, 0.0, 1.0, -1.0, 1.0, 0.0, 1.0, 0.0]], num_groups=4, num_topk_groups=1)[0].tolist() == [[4, 5]]


def test_small_sums_and_not_finite() -> None:
    _, weights = route([[-60.0, -70.0, -80.0]])
    torch.testing.assert_close(weights, torch.tensor([[math.exp(-60) / 1e-20, 0.0]]), rtol=1e-4, atol=1e-8)
    idx, weights = route([[INF, NAN, -INF, 0.0]], num_topk=4)
    assert idx.tolist() == [[1, 0, 3, 2]]
    assert weights.isnan().all()
    idx, weights = route([[INF, 0.0, -INF, 0.0]], num_topk=4)
    assert idx.tolist() == [[0, 1, 3, 2]]
    assert weights.tolist() == [[0.5, 0.25, 0.25, 0.0]]


def test_no_valid_expert() -> None:
    idx, _ = route([[1.0, 2.0, 3.0, 4.0]], [-INF] * 4, num_groups=2, num_topk_groups=1)
    assert idx.tolist() == [[0, 1]]


def test_mask_and_unmapped() -> None:
    unmapped = torch.full((2, 2), 99)
    mask = torch.tensor([False, True])
    idx, weights = route([[1.0, 2.0, 3.0]] * 2, mask=mask, unmapped_topk_idx=unmapped)
    assert idx.tolist() == [[-1, -1], [2, 1]]
    assert weights[0].tolist() == [0.0, 0.0]
    assert unmapped.tolist() == [[-1, -1], [2, 1]]


def test_fixed_routing() -> None:
    unmapped = torch.tensor([[3, 1], [1, -5], [2, 2]])
    fix, mask = torch.tensor([True, True, False]), torch.tensor([True, True, True])
    logits = [[logit(p) for p in (0.2, 0.4, 0.6, 0.1)]] * 3
    idx, weights = route(logits, fix_routing_mask=fix, mask=mask, unmapped_topk_idx=unmapped)
    assert idx.tolist() == [[3, 1], [1, -1], [2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.8], [2 / 3, 1 / 3], [0.6, 0.4]]))
    assert unmapped.tolist() == [[3, 1], [1, -5], [2, 1]]


def test_fixed_and_masked() -> None:
    unmapped = torch.tensor([[3, 1]])
    off, on = torch.tensor([False]), torch.tensor([True])
    idx, weights = route([[0.0] * 4], fix_routing_mask=on, mask=off, unmapped_topk_idx=unmapped)
    assert (idx.tolist(), weights.tolist(), unmapped.tolist()) == ([[-1, -1]], [[0.0, 0.0]], [[-1, -1]])


def test_copies_by_hand() -> None:
    # Two routed experts and one shared, with one or two copies each.
    physical = torch.tensor([[0, 4, -1, -1], [1, 2, -1, -1], [3, -1, -1, -1]], dtype=torch.int32)
    count = torch.tensor([2, 2, 1], dtype=torch.int32)
    unmapped = torch.zeros((3, 1), dtype=torch.int64)
    for ep_rank in (0, 1):
        idx, weights = route(
            [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]],
            num_topk=1,
            use_shared_as_routed=True,
            num_shared_experts=1,
            routed_scaling_factor=3.0,
            ep_rank=ep_rank,
            num_ep_ranks=2,
            to_physical_map=physical,
            logical_count=count,
            unmapped_topk_idx=unmapped,
        )
        # 23333 is odd: copies alternate from token to token.
        expected = [[0, 3], [4, 3], [1, 3]] if ep_rank == 0 else [[4, 3], [0, 3], [2, 3]]
        assert idx.tolist() == expected
        assert weights.tolist() == [[3.0, 1.0]] * 3
        assert unmapped.tolist() == [[0], [0], [1]]


def test_copies_count_in_64_bits() -> None:
    num_tokens = 200_000
    physical = torch.arange(7, dtype=torch.int32).view(1, 7)
    idx, _ = route(
        [[0.0]] * num_tokens,
        num_topk=1,
        ep_rank=3,
        num_ep_ranks=7,
        to_physical_map=physical,
        logical_count=torch.tensor([7], dtype=torch.int32),
    )
    assert idx[:, 0].tolist() == [(3 + t * 23333) % 7 for t in range(num_tokens)]


# ---- against plain Python


def naive(
    logits: list[float], bias: list[float], num_topk: int, kept: int, num_groups: int, scoring_func: ScoringFunc
) -> tuple[list[int], list[float]]:
    """Selection and weights in Python's float64."""
    if scoring_func is SOFTMAX:
        powers = [math.exp(x - max(logits)) for x in logits]
        scores, ranks = [p / sum(powers) for p in powers], [x + b for x, b in zip(logits, bias)]
    else:
        sigmoid = scoring_func is SIGMOID
        scores = [1 / (1 + math.exp(-x)) if sigmoid else math.sqrt(math.log1p(math.exp(x))) for x in logits]
        ranks = [s + b for s, b in zip(scores, bias)]
    left = list(range(len(logits)))
    if num_groups:
        size = len(logits) // num_groups
        sums = [sum(sorted(ranks[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        best = sorted(range(num_groups), key=lambda g: (-sums[g], g))[:kept]
        left = [e for e in left if e // size in best]
    chosen = sorted(left, key=lambda e: (-ranks[e], e))[:num_topk]
    total = max(sum(scores[e] for e in chosen), 1e-20)
    return chosen, [scores[e] / total for e in chosen]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reference_against_plain_python(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 5))
    size, kept = data.draw(st.integers(2, 6)), data.draw(st.integers(1, num_groups))
    num_topk = data.draw(st.integers(1, kept * size))
    scoring_func = data.draw(st.sampled_from([SIGMOID, SQRTSOFTPLUS, SOFTMAX]))
    few = data.draw(st.booleans())
    # Equal, or so far apart that no rounding of a rank or of a sum of two matters.
    values = (-1.3, -0.4, 0.5, 1.9) if few else tuple(-3 + 0.0371 * i + 0.0001 * i**2 for i in range(97))
    logits = data.draw(st.lists(st.sampled_from(values), min_size=num_groups * size, max_size=num_groups * size))
    bias = [0.0] * len(logits)
    x = torch.tensor([logits])
    if not few and num_groups != kept:
        num_groups = kept = 0
    idx, weights = tk_moe.top2_sum_gate(
        x, torch.tensor(bias), num_topk, kept, num_groups, False, 0, 1.0, 0, 1, 0, 1, scoring_func
    )
    expected, expected_weights = naive(x[0].tolist(), bias, num_topk, kept, num_groups, scoring_func)
    assert idx.tolist() == [expected]
    torch.testing.assert_close(weights, torch.tensor([expected_weights]), rtol=1e-5, atol=1e-8)


# ---- the comparison that the gpu tests rest on


@pytest.mark.parametrize(
    ("ranks", "selection", "kept", "num_groups", "right"),
    [
        ([0.5, 0.5 + 1e-6, 0.1, 0.2], [0, 1], 0, 0, True),
        ([0.5, 0.5 + 1e-6, 0.1, 0.2], [1, 0], 0, 0, True),
        ([0.5, 0.5 + 3e-6, 0.1, 0.2], [0, 1], 0, 0, False),
        ([0.5, 0.5 + 1e-6, 0.1, 0.2], [0, 0], 0, 0, False),
        ([0.5, 0.5 + 1e-6, 0.1, 0.2], [0], 0, 0, True),
        ([0.5, 0.4, 0.1, 0.2], [0, 3], 0, 0, False),
        ([0.5, 0.4, 0.1, 0.2], [0, 4], 0, 0, False),
        ([0.5, 0.4, 0.1, 0.2], [0, -1], 0, 0, False),
        ([NAN, INF, 0.0, -INF], [0, 1, 2, 3], 0, 0, True),
        ([NAN, INF, 0.0, -INF], [1, 0], 0, 0, False),
        ([0.5, 0.4, 0.6, 0.3 + 1e-6], [2, 3], 1, 2, True),  # sums 0.9 and 0.900001
        ([0.5, 0.4, 0.6, 0.3 + 1e-6], [0, 1], 1, 2, True),
        ([0.5, 0.4, 0.6, 0.3 + 1e-6], [2, 0], 1, 2, False),
        ([0.5, 0.4, 0.6, 0.3 + 1e-5], [0, 1], 1, 2, False),
        ([0.5, 0.4, 0.6, 0.2, 0.3, 0.2], [2, 0], 2, 3, True),
        ([0.5, 0.4, 0.3, 0.2, 0.3, 0.2], [0, 1, 4], 2, 3, True),
        ([0.5, 0.4, 0.3, 0.2, 0.3, 0.2], [0, 1, 2, 4], 2, 3, False),
    ],
)
def test_assert_selection(ranks: list[float], selection: list[int], kept: int, num_groups: int, right: bool) -> None:
    if right:
        assert_selection(torch.tensor(ranks), selection, kept, num_groups)
    else:
        with pytest.raises(AssertionError):
            assert_selection(torch.tensor(ranks), selection, kept, num_groups)


@pytest.mark.parametrize(
    "options", [{}, {"unmapped": "contiguous"}, {"mask": True, "num_extra": 3, "unmapped": "strided"}]
)
def test_compare_finds_each_fault(options: dict[str, Any]) -> None:
    kwargs = make(50, 16, 4, (2, 4), **options)("cpu")
    inputs = tuple(value for name, value in kwargs.items() if name != "unmapped_topk_idx")

    def outputs() -> Any:
        unmapped = kwargs["unmapped_topk_idx"]
        unmapped = None if unmapped is None else unmapped.clone()
        return tk_moe.top2_sum_gate(**{**kwargs, "unmapped_topk_idx": unmapped}), unmapped

    (expected, unmapped) = outputs()
    compare((expected, unmapped, *inputs), (expected, unmapped, *inputs))
    row = int(torch.nonzero(expected[0][:, 0] >= 0)[0])
    for fault in ("index", "weight", "order", "logits", *(["unmapped"] if unmapped is not None else [])):
        (idx, weights), own = outputs()
        changed = inputs
        if fault == "index":
            idx[row, 1] = (idx[row, 1] + 1) % 16
        elif fault == "weight":
            weights[row, 1] *= 1 + 1e-4
        elif fault == "order":
            idx[row] = idx[row].flip(0)
        elif fault == "unmapped":
            own[row] = own[row].flip(0)
        else:
            changed = (inputs[0] + 1, *inputs[1:])
        with pytest.raises(AssertionError):
            compare(((idx, weights), own, *changed), (expected, unmapped, *inputs))


# ---- bad input

MAP = {"to_physical_map": torch.zeros(9, 3, dtype=torch.int32), "logical_count": torch.ones(9, dtype=torch.int32)}
SHARED = {"use_shared_as_routed": True, "num_shared_experts": 1, **MAP}
GOOD: dict[str, Any] = {
    "logits": torch.zeros(3, 8),
    "bias": torch.zeros(8),
    "num_topk": 2,
    "num_topk_groups": 2,
    "num_groups": 4,
    "use_shared_as_routed": False,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "ep_rank": 0,
    "num_ep_ranks": 1,
    "tp_rank": 0,
    "num_tp_ranks": 1,
    "scoring_func": SIGMOID,
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"logits": torch.zeros(3, 1025)}, ValueError, "num_experts.*1 to 1024"),
        ({"bias": torch.zeros(7)}, ValueError, "bias.*shape"),
        ({"num_topk": 9}, ValueError, "num_topk.*1 to 8"),
        ({"num_topk": 5}, ValueError, "num_topk.*groups kept.*1 to 4.*5"),
        ({"num_groups": 3}, ValueError, "num_groups.*divisor of 8.*3"),
        ({"num_groups": 0}, ValueError, "num_topk_groups.*0 to 0.*2"),
        ({"num_topk_groups": 0}, ValueError, "num_topk_groups.*1 to 4.*0"),
        ({"num_topk_groups": 5}, ValueError, "num_topk_groups.*0 to 4.*5"),
        ({"num_groups": 8}, ValueError, "num_groups.*at least 2 experts.*8"),
        ({"num_topk_sum": 3}, ValueError, "num_topk_sum.*1 to 2.*3"),
        ({"logits": torch.zeros(1, 66), "bias": torch.zeros(66), "num_groups": 33}, ValueError, "num_groups.*1 to 32"),
        ({**SHARED, "num_shared_experts": 3}, ValueError, "num_shared_experts.*1 to 2.*3"),
        ({"use_shared_as_routed": True, "num_shared_experts": 1}, ValueError, "num_shared_experts.*at most 0"),
        ({**SHARED, "num_topk": 3}, ValueError, "num_experts.*multiple of 3"),
        (
            {
                "use_shared_as_routed": True,
                "num_shared_experts": 2,
                "num_topk": 3,
                "to_physical_map": torch.zeros(10, 3, dtype=torch.int32),
                "logical_count": torch.ones(10, dtype=torch.int32),
            },
            ValueError,
            "num_topk.*multiple of 2",
        ),
        ({"ep_rank": 1}, ValueError, "ep_rank.*0 to 0"),
        ({"num_ep_ranks": 9}, ValueError, "num_ep_ranks.*1 to 8"),
        ({"tp_rank": 1}, ValueError, "tp_rank.*0 to 0"),
        ({"num_tp_ranks": 0}, ValueError, "num_tp_ranks.*1 to"),
        ({"scoring_func": ScoringFunc.IDENTITY}, ValueError, "scoring_func.*identity"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, "mask.*shape"),
        ({"fix_routing_mask": torch.ones(3, dtype=torch.bool)}, ValueError, "unmapped_topk_idx.*fix_routing_mask"),
        ({"unmapped_topk_idx": torch.zeros(3, 3, dtype=torch.int64)}, ValueError, "unmapped_topk_idx.*shape"),
        ({"unmapped_topk_idx": torch.zeros(2, 3, dtype=torch.int64).T}, ValueError, "unmapped_topk_idx.*stride 1"),
        (
            {"unmapped_topk_idx": torch.zeros(1, 2, dtype=torch.int64).expand(3, 2)},
            ValueError,
            "unmapped_topk_idx.*apart in memory",
        ),
        ({"to_physical_map": torch.zeros(8, 2, dtype=torch.int32)}, ValueError, "logical_count.*to_physical_map"),
        ({"logical_count": torch.ones(8, dtype=torch.int32)}, ValueError, "to_physical_map.*logical_count"),
        ({**MAP}, ValueError, "to_physical_map.*shape"),
        ({**SHARED, "to_physical_map": torch.zeros(9, 0, dtype=torch.int32)}, ValueError, "X.*0 to 32767"),
        ({**SHARED, "logical_count": torch.ones(8, dtype=torch.int32)}, ValueError, "logical_count.*shape"),
    ],
)


@pytest.mark.gpu
def test_gpu_a_wide_fixed_index_is_no_other_expert() -> None:
    fixed = {"fix_routing_mask": torch.ones(3, dtype=torch.bool), "unmapped_topk_idx": torch.full((3, 2), 2**32 + 5)}
    idx, _ = tk_moe.top2_sum_gate(**transfer({**GOOD, **fixed}, "cuda"))
    assert (idx >= GOOD["logits"].shape[1]).all()
