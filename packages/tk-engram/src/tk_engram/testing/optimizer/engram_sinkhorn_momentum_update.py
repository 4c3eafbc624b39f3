"""Named cases of engram_sinkhorn_momentum_update."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.optimizer.engram_sinkhorn_momentum_update import engram_sinkhorn_momentum_update

Make = Callable[[str], dict[str, Any]]
_BF16, _FP32 = torch.bfloat16, torch.float32


def make(
    shape: tuple[int, ...],
    grad_dtype: torch.dtype,
    buffer_dtype: torch.dtype,
    *,
    nesterov: bool = True,
    values: str = "normal",
    first_element: int = 0,
) -> Make:
    """Normal values, or of many magnitudes with infinities (`wide`).

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def tensor(dtype: torch.dtype) -> torch.Tensor:
            x = torch.empty(first_element + torch.Size(shape).numel(), dtype=dtype, device=device).normal_()
            if values == "wide":
                x.mul_(torch.exp2(torch.randint(-20, 20, x.shape, device=device)))
                x[::17], x[1::19] = torch.inf, -torch.inf
            return x[first_element:].view(shape)

        return {
            "grad": tensor(grad_dtype),
            "momentum_buffer": tensor(buffer_dtype),
            "beta1": 0.95,
            "nesterov": nesterov,
        }

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and the buffer twice: it is read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["momentum_buffer"])


SPEC = OpSpec(
    op=engram_sinkhorn_momentum_update,
    reference=reference.engram_sinkhorn_momentum_update,
    least_bytes=least_bytes,
    mutates=("momentum_buffer",),
    cases=(
        # Vectors of eight, four and one; two thread blocks; every pair of dtypes.
        Case("bf16-fp32-n1000", make((1000,), _BF16, _FP32), small=True, modes=True),
        Case("fp32-fp32-n4104", make((4104,), _FP32, _FP32), small=True, modes=True),
        Case("bf16-bf16-n1004", make((1004,), _BF16, _BF16, nesterov=False), small=True, compile=True),
        Case("fp32-bf16-n777", make((777,), _FP32, _BF16), small=True),
        Case("fp32-fp32-n1001", make((1001,), _FP32, _FP32, nesterov=False), small=True),
        Case("bf16-fp32-n3x5x8", make((3, 5, 8), _BF16, _FP32), small=True),
        Case("bf16-fp32-n0", make((0,), _BF16, _FP32), small=True),
        Case("fp32-fp32-n1000-wide", make((1000,), _FP32, _FP32, values="wide"), small=True),
        Case("bf16-bf16-n64-unaligned", make((64,), _BF16, _BF16, first_element=1), small=True),
        *(
            Case(f"{name}-n{n}", make((n,), grad, buffer))
            for name, grad, buffer, n in (
                ("bf16-fp32", _BF16, _FP32, 4001 * 256),
                ("bf16-bf16", _BF16, _BF16, 4001 * 576),
                ("fp32-fp32", _FP32, _FP32, 8001 * 1280),
                ("fp32-bf16", _FP32, _BF16, 4001 * 127),
            )
        ),
        Case(
            "bf16-fp32-n268435456-bench",
            make((1 << 28,), _BF16, _FP32),
            bench=True,
            model_shape=True,
            gpu=False,
            compile=True,
        ),
        Case("fp32-fp32-n268435456-bench", make((1 << 28,), _FP32, _FP32), bench=True, gpu=False),
        Case("bf16-bf16-n268435456-bench", make((1 << 28,), _BF16, _BF16), bench=True, gpu=False),
        Case("bf16-fp32-n1048576-bench", make((1 << 20,), _BF16, _FP32), bench=True, gpu=False),
    ),
)
