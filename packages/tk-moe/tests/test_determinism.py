"""Every op of tk-moe gives the same bits 100 times, on any number of SMs, while another stream keeps the GPU busy."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tk_core
from tk_core.testing import Case, OpSpec, assert_equal
from tk_core.testing.specs import load_specs
from tk_core.testing.trees import tensors, transfer

NUM_RUNS = 100
SM_COUNTS = (None, 1, 3, 16, 100)


def num_elements(case: Case) -> int:
    """Elements of all tensors among the arguments; 0 if one of them is empty."""
    sizes = [x.numel() for x in tensors(case.make("meta"))]
    return sum(sizes) if all(sizes) else 0


def cases(spec: OpSpec) -> list[Case]:
    """The first small case, and the largest of at most 4 million elements, which keeps 100 runs below a second."""
    candidates = [case for case in spec.cases if case.gpu]
    large = max((case for case in candidates if num_elements(case) <= 1 << 22), key=num_elements)
    return list(dict.fromkeys((next(case for case in candidates if case.small), large)))


def keep_busy(side: torch.cuda.Stream, x: torch.Tensor, run: int) -> None:
    """Launch 1 to 3 matrix products, by the run, so that the op's blocks come to other SMs in another order."""
    with torch.cuda.stream(side):
        for _ in range(1 + run % 3):
            x @ x


@pytest.mark.gpu
@pytest.mark.parametrize("op", load_specs("tk_moe"))
def test_same_bits(op: str) -> None:
    spec = load_specs("tk_moe")[op]
    side, x = torch.cuda.Stream(), torch.rand(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for case in cases(spec):
        kwargs = case.make("cuda")

        def run(kwargs: dict[str, Any] = kwargs) -> object:
            own = transfer(kwargs) if spec.mutates else kwargs
            return (spec.op(**own), *(own[name] for name in spec.mutates))

        expected = run()
        torch.cuda.synchronize()
        for index in range(NUM_RUNS):
            keep_busy(side, x, index)
            count = SM_COUNTS[index % len(SM_COUNTS)]
            with nullcontext() if count is None else tk_core.num_sms(count):
                actual = run()
            assert_equal(actual, expected, name=f"{case.name}, run {index}, {count or 'all'} SMs")
