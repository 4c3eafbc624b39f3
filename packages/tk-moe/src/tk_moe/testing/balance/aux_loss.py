"""Named cases of aux_loss and aux_loss_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.numeric import assert_same_metadata
from tk_moe import reference
from tk_moe.balance.aux_loss import aux_loss, aux_loss_bwd

Make = Callable[[str], dict[str, Any]]


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow an error of 1e-5 of the value, plus 1e-6 of the largest magnitude in its row, as terms may cancel."""
    assert_same_metadata(actual, expected, "result")
    if expected.numel() == 0:
        return
    difference = (actual.double() - expected.double()).abs()
    magnitude = expected.double().abs()
    largest = magnitude.amax(-1, keepdim=True) if expected.ndim else magnitude
    worst = (difference - 1e-5 * magnitude - 1e-6 * largest).max().item()
    assert worst <= 0, f"result: expected within 1e-5, got a difference that is {worst} too large"


def make(
    num_tokens: int,
    num_experts: int,
    values: str = "sigmoid",
    alpha: float = 1.0,
    backward: bool = False,
    first_element: int = 0,
) -> Make:
    """Scores of normal logits by sigmoid or softmax, or "sparse": most are 0, and all of every third token.

    The scores start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        scores = torch.empty(first_element + num_tokens * num_experts, device=device)[first_element:]
        scores = scores.view(num_tokens, num_experts)
        fi = torch.empty(num_experts, device=device)
        if device != "meta":
            logits = torch.randn(scores.shape, device=device)
            scores.copy_(logits.softmax(1) if values == "softmax" else logits.sigmoid())
            if values == "sparse":
                scores[torch.rand(scores.shape, device=device) < 0.7] = 0
                scores[::3] = 0
            fi.copy_(torch.rand(num_experts, device=device) * 2)
            fi[::5] = 0
        inputs: dict[str, Any] = {"scores": scores, "fi": fi, "alpha": alpha}
        if backward:
            inputs = {"grad_loss": torch.full((), 0.37, device=device), **inputs}
        return inputs

    return build


_MODEL_EXPERTS = (8, 16, 36, 72, 108, 128, 144, 256, 288, 384, 512)


def _cases(backward: bool) -> tuple[Case, ...]:
    def made(*args: Any, **kwargs: Any) -> Make:
        return make(*args, backward=backward, **kwargs)

    return (
        # One, two and eight vectors of 4 per lane; vectors of 2 and 1; lanes without any.
        Case("e256-t67", made(67, 256), small=True, modes=True, compile=True),
        Case("e72-t33", made(33, 72, alpha=0.001), small=True, compile=True),
        Case("e13-t17", made(17, 13, alpha=-2.0), small=True, compile=True),
        Case("e66-t5", made(5, 66), small=True, compile=True),
        Case("e1024-t3", made(3, 1024), small=True, compile=True),
        Case("e3-t3", made(3, 3), small=True),
        Case("e256-t0", made(0, 256), small=True),
        Case("e256-t1", made(1, 256), small=True),
        Case("e256-t5-unaligned", made(5, 256, first_element=1), small=True),
        Case("e8-t300-sparse", made(300, 8, "sparse"), small=True),
        *(
            Case(f"e{num_experts}-t{num_tokens}", made(num_tokens, num_experts, "softmax"))
            for num_experts in _MODEL_EXPERTS
            for num_tokens in (2, 31, 4001, 8001)
        ),
        Case("e256-t8192-bench", made(8192, 256), bench=True, model_shape=True, gpu=False),
        *(
            Case(f"e256-t{num_tokens}-bench", made(num_tokens, 256), bench=True, gpu=False)
            for num_tokens in (1, 8, 64, 128, 1024)
        ),
    )


SPEC = OpSpec(op=aux_loss, reference=reference.aux_loss, cases=_cases(False), compare=compare)
BWD_SPEC = OpSpec(op=aux_loss_bwd, reference=reference.aux_loss_bwd, cases=_cases(True), compare=compare)
