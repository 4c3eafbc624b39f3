"""moe_topk_gate_forward."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_moe
from tk_core.testing import Case, Make, OpSpec, assert_equal, construct_logits, empty, tiers
from tk_moe import ScoringFunc
from tk_moe.reference.gate.gate import scores_of
from tk_moe.reference.gate.moe_topk_gate import philox, random_experts

from ..models import MODEL_EXPERTS, benches, name_of

SIGMOID, SQRTSOFTPLUS, SOFTMAX = ScoringFunc.SIGMOID, ScoringFunc.SQRTSOFTPLUS, ScoringFunc.SOFTMAX
BF16, FLOAT32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
INF, NAN = math.inf, math.nan

# Of every scoring function, scores that are not equal are far apart; with a bias of _BIASES so are sums of two of them.
_VALUES = (-1.3, -0.4, 0.5, 1.9)
_BIASES = (0.0, 0.13)
_EXTREMES = (NAN, INF, -INF, 0.0, -0.0, 3.4e38, -3.4e38, 88.0, 20.0, 3.0, -3.0, 1.0, -1.0)


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: ScoringFunc = SQRTSOFTPLUS,
    dtype: torch.dtype = FLOAT32,
    values: str = "apart",
    *,
    groups: tuple[int, int] = (0, 0),
    bias: bool = True,
    mask: bool = False,
    image: bool = False,
    fixed: bool = False,
    random: bool = False,
    num_shared: int = 0,
    num_copies: int = 0,
    unmapped: str = "",
    out: bool = False,
    scores: bool = False,
    offset: str = "int",
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments; groups are (kept, all).

    Values are "apart" by more than the order of ranks may be off, "ties" (of 4 values, with biases of 2), "equal",
    "extremes", or "low" (near -92: sums of scores near 1e-20). unmapped: "", "contiguous" or "strided". The logits
    start at element `first_element` of their storage.
    """

    def draw(device: str) -> tuple[Tensor, Tensor]:
        shape = num_tokens, num_experts
        few = torch.tensor(_BIASES, device=device)[torch.randint(0, 2, (num_experts,), device=device)]
        if values == "apart":
            shift = 0.1 * torch.randn(num_experts, device=device) if bias else few.zero_()

            def ranks_of(x: Tensor) -> Tensor:
                return (x.float() if scoring_func is SOFTMAX else scores_of(x, scoring_func)) + shift

            kwargs = {"ranks_of": ranks_of, "dtype": dtype, "gap": 4e-6, "device": device}
            return construct_logits(*shape, num_topk, **kwargs), shift
        if values == "equal":
            return torch.zeros(shape, device=device), few.zero_()
        if values == "low":
            return torch.randn(shape, device=device) * 0.01 - 92, few
        table = torch.tensor(_VALUES if values == "ties" else _EXTREMES, device=device)
        return table[torch.randint(0, len(table), shape, device=device)], few

    def build(device: str) -> dict[str, Any]:
        drawn, shift = draw(device)
        logits = empty(num_tokens, num_experts, dtype=dtype, device=device, first_element=first_element).copy_(drawn)
        num_slots, num_mapped = num_topk + num_shared, num_experts + num_shared

        def share(part: float) -> Tensor:
            return torch.rand(num_tokens, device=device) < part

        inputs: dict[str, Any] = {"logits": logits, "num_topk": num_topk, "use_shared_as_routed": num_shared > 0}
        inputs |= {"num_shared_experts": num_shared, "routed_scaling_factor": 2.5, "ep_rank": 3}
        inputs |= {"scoring_func": scoring_func, "mask": share(0.8) if mask else None, "bias": shift if bias else None}
        inputs |= {"image_bias": shift.flip(0) if image else None, "image_token_mask": share(0.5) if image else None}
        inputs |= {"fix_routing_mask": share(0.3) if fixed else None, "force_random": share(0.3) if random else None}
        if num_copies:
            sizes = {"size": (num_mapped, num_copies), "dtype": INT32, "device": device}
            inputs["to_physical_map"] = torch.randint(-1, num_mapped + num_copies, **sizes)
            counts = torch.randint(1, num_copies + 1, (num_mapped,), dtype=INT32, device=device)
            inputs["logical_count"] = counts
        inputs |= {"unmapped_topk_idx": None, "out": None, "scores": None}
        if unmapped:
            # Experts, some that are none; overwritten where the routing is not given.
            width = num_topk + (3 if unmapped == "strided" else 0)
            given = torch.randint(0, num_experts, (num_tokens, width), device=device)
            none = torch.tensor((-1, -7, num_experts, 2**32 + 5, -(2**63)), device=device)
            nothing = none[torch.randint(0, len(none), given.shape, device=device)]
            given = torch.where(torch.rand(given.shape, device=device) < 0.1, nothing, given)
            inputs["unmapped_topk_idx"] = given[:, :num_topk]
        if out:
            dtypes = options.get("idx_dtype", INT64), FLOAT32
            inputs["out"] = tuple(torch.ones(num_tokens, num_slots, dtype=each, device=device) for each in dtypes)
        if scores:
            inputs["scores"] = torch.ones(num_tokens, num_experts, device=device)
        inputs |= {"num_groups": groups[1], "num_topk_groups": groups[0], **options}
        offsets = {"int": lambda: 2**32 + 9, "tensor": lambda: torch.full((1,), 2**40 + 1, device=device)}
        inputs |= {"random_offset": offsets[offset]()} if random else {}
        return inputs

    return build


def compare(actual: Any, expected: Any) -> None:
    """Indices are equal; weights and scores within rtol 1e-5, atol 1e-8: they are added otherwise, or approximated."""
    (idx, weights), unmapped, out, scores = actual
    (expected_idx, expected_weights), expected_unmapped, expected_out, expected_scores = expected
    assert_equal(idx, expected_idx, name="topk_idx")
    assert_equal(unmapped, expected_unmapped, name="unmapped_topk_idx")
    assert (out is None) == (expected_out is None)
    assert out is None or [x.data_ptr() for x in out] == [idx.data_ptr(), weights.data_ptr()]
    close = {"rtol": 1e-5, "atol": 1e-8, "equal_nan": True}
    torch.testing.assert_close(weights, expected_weights, **close)
    if expected_scores is not None:
        torch.testing.assert_close(scores, expected_scores, **close)


_OPTIONS = {"mask": True, "image": True, "fixed": True, "random": True, "scores": True, "out": True}
_EVERYTHING: dict[str, Any] = {**_OPTIONS, "num_copies": 5, "unmapped": "strided"}

SPEC = OpSpec(
    op=tk_moe.moe_topk_gate_forward,
    compare=compare,
    mutates=("unmapped_topk_idx", "out", "scores"),
    cases=(
        Case("e256-k6-t9", make(9, 256, 6), small=True, modes=True, compile=True),
        Case("e256-k6-t9-scores", make(9, 256, 6, scores=True, bias=False), small=True, compile=True),
        Case(
            "e64-g2of4-k6-t31-everything",
            make(31, 64, 6, values="ties", groups=(2, 4), num_shared=2, offset="tensor", **_EVERYTHING),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "e72-k6-t31-bf16-everything",
            make(31, 72, 6, SIGMOID, BF16, "ties", num_shared=1, idx_dtype=INT32, **_EVERYTHING),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "e36-k3-t31-softmax-everything",
            make(31, 36, 3, SOFTMAX, values="ties", renormalize=False, **_EVERYTHING),
            small=True,
            compile=True,
        ),
        Case("e13-k13-t3-softmax", make(3, 13, 13, SOFTMAX, scores=True), small=True),
        Case("e1-k1-t3", make(3, 1, 1), small=True),
        Case("e1020-k30-t3-bf16", make(3, 1020, 30, SIGMOID, BF16, "ties", num_shared=2), small=True, compile=True),
        Case("e96-g5of12-k7-t9-one", make(9, 96, 7, values="ties", groups=(5, 12), num_topk_sum=1), small=True),
        Case(
            "e32-g7of32-k5-t9-one", make(9, 32, 5, SOFTMAX, values="ties", groups=(7, 32), num_topk_sum=1), small=True
        ),
        Case("e256-k8-t5-unaligned", make(5, 256, 8, first_element=1, scores=True), small=True),
        Case("e256-k6-t0", make(0, 256, 6, num_shared=1, **_EVERYTHING), small=True),
        Case("e64-k6-t9-random", make(9, 64, 6, random=True, num_shared=1), small=True),
        Case(
            "e64-k6-t9-plain", make(9, 64, 6, SIGMOID, renormalize=False, mask=True, unmapped="contiguous"), small=True
        ),
        *(
            Case(f"e64-k6-t31-{function}-{values}", make(31, 64, 6, function, values=values, scores=True), small=True)
            for function in (SIGMOID, SQRTSOFTPLUS, SOFTMAX)
            for values in ("ties", "equal", "extremes", "low")
            if (function, values) != (SQRTSOFTPLUS, "low")  # Ranks are all closer than their order is defined for.
        ),
        *(
            Case(
                f"e{num_experts}-k{num_topk}-t{num_tokens}-{function}-{name_of(dtype)}",
                make(num_tokens, num_experts, num_topk, function, dtype, values, scores=num_topk % 2 == 0),
            )
            for index, num_experts in enumerate(MODEL_EXPERTS)
            for num_topk, num_tokens in ((min(6, num_experts), 4001), (8, 31))
            for function, dtype, values in (
                ((SQRTSOFTPLUS, FLOAT32, "apart"), (SIGMOID, BF16, "ties"), (SOFTMAX, FLOAT32, "apart"))[index % 3],
            )
        ),
        *(
            Case(f"e256-k8-t8001-{function}", make(8001, 256, 8, function, scores=True))
            for function in (SIGMOID, SQRTSOFTPLUS, SOFTMAX)
        ),
        Case(
            "e256-g4of8-k8-t8001-everything",
            make(8001, 256, 8, values="ties", groups=(4, 8), num_shared=1, **_EVERYTHING),
        ),
        # t * 23333 exceeds 2^31; so does t * 32 + slot with random_offset's bits above.
        Case("e8-k2-t100003-map", make(100003, 8, 2, values="ties", num_copies=7, random=True, unmapped="contiguous")),
        *benches(
            "sqrtsoftplus-e256-k6-t{}", lambda t: make(t, 256, 6), (1, 8, 64, 128, 1024, 8192), models=(128, 8192)
        ),
        *benches(
            "sqrtsoftplus-e256-k6-t{}-scores", lambda t: make(t, 256, 6, scores=True), (128, 8192), models=(8192,)
        ),
        *benches("sigmoid-e256-g4of8-k8-t{}", lambda t: make(t, 256, 8, SIGMOID, groups=(4, 8)), (8192,)),
        *benches("softmax-bf16-e128-k8-t{}", lambda t: make(t, 128, 8, SOFTMAX, BF16, "ties"), (8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)


def gate(logits: list[list[float]], num_topk: int = 2, **options: Any) -> tuple[list[list[int]], Tensor]:
    """The op's indices and weights, with sigmoid scores unless said otherwise."""
    shared = {"use_shared_as_routed": False, "num_shared_experts": 0, "routed_scaling_factor": 1.0, "ep_rank": 0}
    kwargs = {**shared, "scoring_func": "sigmoid", **options}
    idx, weights = tk_moe.moe_topk_gate(torch.tensor(logits), num_topk, **kwargs)
    return idx.tolist(), weights


def logit(p: float) -> float:
    return math.log(p / (1 - p))


SCORES = [logit(p) for p in (0.1, 0.4, 0.8, 0.2, 0.5, 0.6)]


def test_its_two_names() -> None:
    assert tk_moe.moe_topk_gate is tk_moe.moe_topk_gate_forward


def test_weights_by_hand() -> None:
    idx, weights = gate([SCORES], 3, routed_scaling_factor=1.9)
    assert idx == [[2, 5, 4]]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 0.6, 0.5]]))
    _, weights = gate([SCORES], 3, renormalize=False, routed_scaling_factor=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.6, 1.2, 1.0]]))
    idx, weights = gate([[0.0, math.log(3)]], scoring_func="sqrtsoftplus", renormalize=False)
    assert idx == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[math.sqrt(math.log(4)), math.sqrt(math.log(2))]]))


def test_a_small_sum_is_added_to() -> None:
    _, weights = gate([[-92.0] * 4], scoring_func="sqrtsoftplus")
    u = math.exp(-46)
    torch.testing.assert_close(weights, torch.full((1, 2), u / (2 * u + 1e-20)), rtol=1e-4, atol=0.0)
    assert abs(weights[0, 0].item() - 0.339) < 1e-3


def test_biases_of_text_and_images() -> None:
    bias, image_bias = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.25]), torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0])
    image = {"image_bias": image_bias, "image_token_mask": torch.tensor([False, True])}
    idx, weights = gate([SCORES] * 2, bias=bias, **image)
    assert idx == [[0, 5], [3, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.1 / 0.7, 0.6 / 0.7], [0.2 / 0.6, 0.4 / 0.6]]))
    assert gate([SCORES] * 2, **image)[0] == [[2, 5], [3, 1]]


def test_groups_by_their_best_one_or_two() -> None:
    options = {"num_groups": 2, "num_topk_groups": 1}
    # Best 0.8 and 0.6, best two 1.2 and 1.1; of threes 0.8, 0.4 and 0.1 against 0.6, 0.5 and 0.2.
    assert gate([SCORES], **options)[0] == [[2, 1]]
    flat = [logit(p) for p in (0.1, 0.1, 0.8, 0.2, 0.5, 0.6)]
    assert gate([flat], **options)[0] == [[5, 4]]
    assert gate([flat], **options, num_topk_sum=1)[0] == [[2, 0]]


def test_padding_given_routing_and_what_is_written() -> None:
    unmapped = torch.tensor([[3, 1], [1, -5], [2, 2], [0, 1]])
    fix, mask = torch.tensor([True, True, False, True]), torch.tensor([True, True, True, False])
    out = torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 2)
    scores = torch.ones(4, 4)
    row = [logit(p) for p in (0.2, 0.4, 0.6, 0.1)]
    given = {"fix_routing_mask": fix, "mask": mask, "unmapped_topk_idx": unmapped, "out": out, "scores": scores}
    idx, weights = gate([row, row, row, [NAN] * 4], **given)
    assert idx == [[3, 1], [1, -1], [2, 1], [-1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.8], [1.0, 0.0], [0.6, 0.4], [0.0, 0.0]]))
    assert unmapped.tolist() == [[3, 1], [1, -5], [2, 1], [-1, -1]]
    assert weights is out[1]
    assert out[0].tolist() == idx
    expected = torch.tensor([[0.2, 0.4, 0.6, 0.1]] * 3 + [[0.0] * 4])
    torch.testing.assert_close(scores, expected)


def test_copies_and_shared_experts_by_hand() -> None:
    # Two routed experts and one shared, with one or two copies each.
    physical = torch.tensor([[0, 4], [1, 2], [3, -1]], dtype=INT32)
    options = {"use_shared_as_routed": True, "num_shared_experts": 1, "routed_scaling_factor": 3.0}
    options |= {"to_physical_map": physical, "logical_count": torch.tensor([2, 2, 1], dtype=INT32)}
    rows = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    for ep_rank, expected in ((0, [[0, 3], [4, 3], [1, 3]]), (1, [[4, 3], [0, 3], [2, 3]])):
        idx, weights = gate(rows, 1, **{**options, "ep_rank": ep_rank})
        assert idx == expected
        assert weights.tolist() == [[3.0, 1.0]] * 3
    assert gate(rows, 1, use_shared_as_routed=True, num_shared_experts=2)[0] == [[0, 2, 3], [0, 2, 3], [1, 2, 3]]
    one = {"to_physical_map": torch.arange(7, dtype=INT32).view(1, 7), "logical_count": torch.tensor([7], dtype=INT32)}
    idx, _ = gate([[0.0]] * 100_000, 1, ep_rank=3, **one)
    assert [each for (each,) in idx] == [(3 + t * 23333) % 7 for t in range(100_000)]


@pytest.mark.parametrize(
    ("counter", "keys", "words"),
    [
        ((0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((-1, -1), (2**32 - 1, 2**32 - 1), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x85A308D3243F6A88 - 2**64, 0x0370734413198A2E),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_words_that_its_authors_publish(
    counter: tuple[int, int], keys: tuple[int, int], words: str
) -> None:
    found = philox(*map(torch.tensor, counter), keys)
    assert " ".join(f"{int(word):08x}" for word in found) == words


def naive_random(token: int, num_slots: int, num_choices: int, ep_rank: int, offset: int) -> list[int]:
    """The experts of one token, by a list of those that are left."""
    picks = []
    for slot in range(num_slots):
        _, word, *_ = philox(torch.tensor(offset), torch.tensor(token * 32 + slot), (ep_rank, 0))
        picks.append(int(word) % (num_choices - slot))
    is_open = [True] * num_slots
    for _ in range(num_slots):
        least, winner = min((pick, slot) for slot, pick in enumerate(picks) if is_open[slot])
        is_open[winner] = False
        for slot in range(winner + 1, num_slots):
            picks[slot] += is_open[slot] and picks[slot] >= least
    return picks


def test_random_experts() -> None:
    options = {"num_topk": 3, "use_shared_as_routed": True, "num_shared_experts": 1, "ep_rank": 5}
    every = torch.ones(400, dtype=torch.bool)

    def run(**more: Any) -> tuple[list[list[int]], Tensor]:
        return gate([[0.0] * 6] * 400, **{**options, "force_random": every, **more})

    idx, weights = run()
    assert all(len({*row}) == 4 for row in idx)
    assert idx[:20] == [naive_random(t, 4, 7, 5, 0) for t in range(20)]
    assert weights.min() > 0
    assert weights.max() <= 1
    assert abs(weights.mean() - 0.5) < 0.03
    counts = torch.tensor(idx).flatten().bincount(minlength=7)
    assert (counts - 1600 / 7).abs().max() < 5 * math.sqrt(1600 / 7)
    offset = 2**40 + 3
    for other in ({"ep_rank": 6}, {"random_offset": 1}, {"random_offset": offset}):
        assert run(**other)[0] != idx
    assert run(random_offset=torch.tensor([offset]))[0] == run(random_offset=offset)[0]
    # With copies there are as many choices as these.
    copies = {"to_physical_map": torch.zeros(7, 3, dtype=INT32), "logical_count": torch.full((7,), 3, dtype=INT32)}
    idx, _ = run(**copies)
    assert {each for row in idx for each in row} == {*range(21)}
    # A choice among as many experts as slots is a permutation.
    picks, _ = random_experts(50, 8, torch.tensor(8), 0, 0)
    assert (picks.sort(dim=1).values == torch.arange(8)).all()


def test_random_tokens_and_the_others() -> None:
    unmapped, scores = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 4)
    random, mask = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    given = {"force_random": random, "mask": mask, "unmapped_topk_idx": unmapped, "scores": scores}
    idx, _ = gate([[NAN] * 4, [0.0, 1.0, 2.0, 3.0], [0.0] * 4], **given)
    assert idx == [naive_random(0, 2, 4, 0, 0), [3, 2], [-1, -1]]
    assert unmapped.tolist() == [[-1, -1], [3, 2], [-1, -1]]
    assert (scores[::2] == 0).all()


# ---- bad input

MAP = {"to_physical_map": torch.zeros(8, 3, dtype=INT32), "logical_count": torch.ones(8, dtype=INT32)}
GOOD: dict[str, Any] = {
    "logits": torch.zeros(3, 8),
    "num_topk": 2,
    "use_shared_as_routed": False,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "ep_rank": 0,
}
TOKENS = torch.ones(3, dtype=torch.bool)


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"logits": torch.zeros(3, 1025)}, ValueError, "num_experts.*1 to 1024"),
        ({"num_topk": 9}, ValueError, "num_topk.*1 to 8"),
        ({"logits": torch.zeros(3, 64), "num_topk": 33}, ValueError, "num_topk.*1 to 32.*33"),
        (
            {"logits": torch.zeros(3, 64), "num_topk": 31, "use_shared_as_routed": True, "num_shared_experts": 2},
            ValueError,
            "num_topk.*1 to 30",
        ),
        ({"use_shared_as_routed": True}, ValueError, "num_shared_experts.*1 to 2.*0"),
        ({"scoring_func": "identity"}, ValueError, "scoring_func.*identity"),
        ({"num_groups": 3, "num_topk_groups": 1}, ValueError, "num_groups.*divisor of 8.*3"),
        ({"num_groups": 4, "num_topk_groups": 5}, ValueError, "num_topk_groups.*0 to 4.*5"),
        ({"num_groups": 8, "num_topk_groups": 2}, ValueError, "num_groups.*at least 2 experts.*8"),
        ({"num_groups": 4}, ValueError, "num_topk_groups.*1 to 4.*0"),
        ({"num_groups": 4, "num_topk_groups": 1, "num_topk": 3}, ValueError, "num_topk.*groups kept.*1 to 2.*3"),
        (
            {"logits": torch.zeros(1, 66), "num_groups": 33, "num_topk_groups": 2},
            ValueError,
            "num_groups.*1 to 32.*33",
        ),
        ({"num_topk_sum": 3}, ValueError, "num_topk_sum.*1 to 2.*3"),
        ({"mask": TOKENS[:2]}, ValueError, "mask.*shape"),
        ({"image_bias": torch.zeros(8)}, ValueError, "image_token_mask.*beside image_bias"),
        ({"image_token_mask": TOKENS}, ValueError, "image_bias.*beside image_token_mask"),
        ({"fix_routing_mask": TOKENS}, ValueError, "unmapped_topk_idx.*fix_routing_mask"),
        ({"unmapped_topk_idx": torch.zeros(3, 3, dtype=INT64)}, ValueError, "unmapped_topk_idx.*shape"),
        ({**MAP, "logical_count": None}, ValueError, "logical_count.*to_physical_map"),
        ({**MAP, "to_physical_map": None}, ValueError, "to_physical_map.*logical_count"),
        ({**MAP, "to_physical_map": torch.zeros(8, 0, dtype=INT32)}, ValueError, "D.*to_physical_map.*1 to 32768"),
        ({"scores": torch.zeros(3, 7)}, ValueError, "scores.*shape"),
        ({"out": (torch.zeros(3, 2, dtype=INT32), torch.zeros(3, 2))}, TypeError, r"out\[0\].*int64"),
        ({"out": (torch.zeros(3, 2, dtype=INT64), torch.zeros(3, 3))}, ValueError, r"out\[1\].*shape"),
        ({"ep_rank": -1}, ValueError, "ep_rank.*0 to"),
        ({"random_offset": -1}, ValueError, "random_offset.*0 to"),
        ({"random_offset": torch.zeros(2, dtype=INT64)}, ValueError, "random_offset.*shape"),
    ],
)
