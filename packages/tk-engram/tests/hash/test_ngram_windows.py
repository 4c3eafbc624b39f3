"""ngram_windows."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import tk_engram
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers


def make(
    lengths: tuple[int, ...] | int,
    max_ngram: int = 3,
    *,
    vocab_size: int = 129280,
    block_id: int | None = None,
    history: bool = False,
) -> Make:
    """Ids of a vocabulary, in sequences of these lengths; an int is one sequence without cu_seqlens.

    A third of the entries of `history` are negative: no ids.
    """

    def build(device: str) -> dict[str, Any]:
        num_sequences, num_tokens = (1, lengths) if isinstance(lengths, int) else (len(lengths), sum(lengths))
        cu_seqlens = None
        if not isinstance(lengths, int):
            cu_seqlens = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)
        earlier = None
        if history:
            shape = (num_sequences, max_ngram - 1)
            earlier = torch.randint(-(vocab_size // 2), vocab_size, shape, dtype=torch.int32, device=device)
        return {
            "token_ids": torch.randint(0, vocab_size, (num_tokens,), dtype=torch.int32, device=device),
            "cu_seqlens": cu_seqlens,
            "N": max_ngram,
            "pad_id": 2,
            "block_id": block_id,
            "history": earlier,
        }

    return build


def _lengths(num_sequences: int, num_tokens: int) -> tuple[int, ...]:
    """Lengths of sequences, 0 to 22 tokens but for the last, which has the rest of num_tokens."""
    lengths = [7 * i % 23 for i in range(num_sequences - 1)]
    return (*lengths, num_tokens - sum(lengths))


SPEC = OpSpec(
    op=tk_engram.ngram_windows,
    cases=(
        Case("n3-t65", make(65), small=True, modes=True),
        Case("n3-b5-t130", make((3, 0, 64, 1, 62)), small=True, modes=True),
        Case("n3-b1-t70", make((70,)), small=True),
        Case("n3-b2-empty", make((0, 3, 0)), small=True),
        Case("n5-b5-t11-history-block", make((1, 0, 2, 5, 3), 5, vocab_size=9, block_id=4, history=True), small=True),
        Case("n4-b67-decode", make((1,) * 67, 4, history=True), small=True, modes=True),
        Case("n4-t3-history", make(3, 4, vocab_size=5, block_id=1, history=True), small=True, compile=True),
        Case("n16-b9-t150", make(_lengths(9, 150), 16, vocab_size=40, block_id=0), small=True),
        Case("n2-t1", make(1, 2), small=True),
        Case("n3-t0", make(0), small=True),
        Case("n3-b2-t0-history", make((0, 0), history=True), small=True),
        Case("n3-b0-t0", make(()), small=True),
        *(Case(f"n3-t{num_tokens}", make(num_tokens)) for num_tokens in (17, 4001)),
        Case("n4-b300-t8001", make(_lengths(300, 8001), 4, vocab_size=50, block_id=7)),
        Case("n4-b300-t8001-history", make(_lengths(300, 8001), 4, vocab_size=50, block_id=7, history=True)),
        Case("n3-b4001-decode", make((1,) * 4001, history=True)),
        Case("n3-b4096-t4096", make((0, 2) * 2048, history=True)),
        bench_case("n3-b16-t8192", make(_lengths(16, 8192)), model_shape=True, compile=True),
        bench_case("n3-t8192", make(8192), model_shape=True),
        *(
            bench_case(f"n3-b{num_tokens}-decode", make((1,) * num_tokens, history=True))
            for num_tokens in (1, 64, 4001, 8001)
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


def int32(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_one_sequence_by_hand(device: str) -> None:
    out = tk_engram.ngram_windows(int32([10, 11, 12, 13], device), None, 3, 2)
    assert out.dtype == torch.int32
    assert out.tolist() == [[10, 2, 2], [11, 10, 2], [12, 11, 10], [13, 12, 11]]


def test_sequences_by_hand(device: str) -> None:
    ids, bounds = int32([10, 11, 12, 13, 14], device), int32([0, 0, 2, 2, 5, 5], device)
    out = tk_engram.ngram_windows(ids, bounds, 3, -9)
    assert out.tolist() == [[10, -9, -9], [11, 10, -9], [12, -9, -9], [13, 12, -9], [14, 13, 12]]


def test_blocks_by_hand(device: str) -> None:
    # 99 is neither in a window nor seen through, not even by itself.
    out = tk_engram.ngram_windows(int32([10, 99, 11, 12, 13], device), None, 3, 2, block_id=99)
    assert out.tolist() == [[10, 2, 2], [2, 2, 2], [11, 2, 2], [12, 11, 2], [13, 12, 11]]


def test_history_by_hand(device: str) -> None:
    ids, bounds = int32([10, 20, 21, 30, 40], device), int32([0, 1, 3, 4, 5], device)
    # Of the third sequence only the first entry counts; the fourth meets block_id 99 at once.
    history = int32([[9, 8, 7], [19, -1, 17], [29, -5, 27], [99, 38, 37]], device)
    out = tk_engram.ngram_windows(ids, bounds, 4, 2, block_id=99, history=history)
    assert out.tolist() == [[10, 9, 8, 7], [20, 19, 2, 2], [21, 20, 19, 2], [30, 29, 2, 2], [40, 2, 2, 2]]
    assert tk_engram.ngram_windows(ids[:2], None, 4, 2, history=history[:1]).tolist() == [[10, 9, 8, 7], [20, 10, 9, 8]]


def test_any_id_is_an_id(device: str) -> None:
    # Negative ids are none in history only; the extremes are ids and may be pad_id and block_id.
    low, high = -(2**31), 2**31 - 1
    ids = int32([-1, low, high, 0], device)
    assert tk_engram.ngram_windows(ids, None, 2, high).tolist() == [[-1, high], [low, -1], [high, low], [0, high]]
    out = tk_engram.ngram_windows(ids, None, 2, low, block_id=low)
    assert out.tolist() == [[-1, low], [low, low], [high, low], [0, high]]
    out = tk_engram.ngram_windows(ids, None, 2, 5, block_id=0)
    assert out.tolist() == [[-1, 5], [low, -1], [high, low], [5, 5]]


def window(ids: list[int], history: list[int], token: int, inputs: dict[str, Any]) -> list[int]:
    """The window of a token of one sequence, from all that was before it."""
    past = [*ids[token::-1]]
    for earlier in history:
        if earlier < 0:
            break
        past.append(earlier)
    if inputs["block_id"] in past:
        past = past[: past.index(inputs["block_id"])]
    return (past + [inputs["pad_id"]] * inputs["N"])[: inputs["N"]]


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("lengths", [(5,), (1,) * 40, (3, 0, 64, 1, 62, 0, 0, 9), (130, 2)], ids=str)
def test_against_lists(lengths: tuple[int, ...], history: bool, device: str) -> None:
    inputs = make(lengths, 4, vocab_size=9, block_id=3, history=history)(device)
    ids, bounds = inputs["token_ids"].tolist(), inputs["cu_seqlens"].tolist()
    earlier = inputs["history"].tolist() if history else [[]] * len(lengths)
    expected = [
        window(ids[begin:end], earlier[b], t, inputs)
        for b, (begin, end) in enumerate(pairwise(bounds))
        for t in range(end - begin)
    ]
    assert tk_engram.ngram_windows(**inputs).tolist() == expected


IDS, BOUNDS, HISTORY = int32([1, 2, 3, 4]), int32([0, 1, 4]), int32([[5, 6], [7, 8]])
GOOD: dict[str, Any] = {
    "token_ids": IDS,
    "cu_seqlens": BOUNDS,
    "N": 3,
    "pad_id": 2,
    "block_id": 9,
    "history": HISTORY,
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"cu_seqlens": BOUNDS[:1], "history": None}, ValueError, "cu_seqlens: .*at least 2 elements"),
        ({"cu_seqlens": BOUNDS[:0], "history": None}, ValueError, "cu_seqlens: .*at least 2 elements"),
        ({"token_ids": IDS[:0], "cu_seqlens": BOUNDS[:0]}, ValueError, "cu_seqlens: .*at least 1 elements"),
        ({"N": 1}, ValueError, "N: .*2 to 16"),
        ({"N": 17}, ValueError, "N: .*2 to 16"),
        ({"pad_id": 2**31}, ValueError, "pad_id: "),
        ({"pad_id": -(2**31) - 1}, ValueError, "pad_id: "),
        ({"block_id": 2**31}, ValueError, "block_id: "),
        ({"history": HISTORY[:1]}, ValueError, "history: .*shape"),
        ({"history": HISTORY.repeat(1, 2)}, ValueError, "history: .*shape"),
        ({"history": HISTORY, "cu_seqlens": None}, ValueError, "history: .*shape"),
    ],
)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 2, 4], "expected offsets from 0 to 4 tokens, got 1 to 4"),
        ([0, 2, 3], "expected offsets from 0 to 4 tokens, got 0 to 3"),
        ([0, 2, 5], "expected offsets from 0 to 4 tokens, got 0 to 5"),
        ([0, 5, 4], "expected no element below the one before"),
    ],
)
def test_bad_bounds_raise_in_debug_mode(bounds: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_engram.ngram_windows(**GOOD)
    with pytest.raises(ValueError, match=f"cu_seqlens: {message}"):
        tk_engram.ngram_windows(**{**GOOD, "cu_seqlens": int32(bounds)})


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [[3, 2, 1, 0], [-50, 90, -7, 2**31 - 1], [500, 600, 700, 800], [0] * 4], ids=str)
def test_gpu_bad_bounds_only_give_other_windows(bounds: list[int]) -> None:
    """Every element is written, with an id, a history entry or pad_id; nothing else is touched."""
    inputs = make((90, 5, 5), 4, vocab_size=50, history=True)("cuda")
    inputs["cu_seqlens"] = int32(bounds, "cuda")
    out = tk_engram.ngram_windows(**inputs)
    assert ((out >= 0) & (out < 50)).all()


@pytest.mark.gpu(gib=9)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_tokens = 2**31 // 16 + 77
    token_ids = torch.randint(0, 1000, (num_tokens,), dtype=torch.int32, device="cuda")
    out = tk_engram.ngram_windows(token_ids, None, 16, 2)
    assert_equal(out[-99:].clone(), token_ids[-114:].unfold(0, 16, 1).flip(1).contiguous())
