"""Named cases of ngram_windows."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.hash.ngram_windows import ngram_windows

Make = Callable[[str], dict[str, Any]]


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
    op=ngram_windows,
    reference=reference.ngram_windows,
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
        Case("n3-b16-t8192-bench", make(_lengths(16, 8192)), bench=True, model_shape=True, gpu=False, compile=True),
        Case("n3-t8192-bench", make(8192), bench=True, model_shape=True, gpu=False),
        *(
            Case(f"n3-b{num_tokens}-decode-bench", make((1,) * num_tokens, history=True), bench=True, gpu=False)
            for num_tokens in (1, 64, 4001, 8001)
        ),
    ),
)
