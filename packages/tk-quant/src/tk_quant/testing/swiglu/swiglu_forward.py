"""Named cases of swiglu_forward."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import ceil_div
from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.reference.lib.swiglu import real_positions
from tk_quant.swiglu.swiglu_forward import swiglu_forward
from tk_quant.testing.per_token.per_token_cast import MakeInput, extremes
from tk_quant.testing.swiglu.swiglu_forward_and_per_token_cast import activations, every_gate, segments

Make = Callable[[str], dict[str, Any]]

FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
NUM_TOPK = 8
_BF16, _FP32 = torch.bfloat16, torch.float32


def make(
    x: MakeInput,
    *,
    padding: tuple[int, int] | None = None,
    beyond: bool = False,
    experts: bool = False,
    counted: bool = False,
    first_element: int = 0,
    **more: Any,
) -> Make:
    """Arguments of the op. `padding` adds weights, see `segments`; `beyond` puts some indices past the weights' end.

    x starts at element `first_element` of its storage, and is NaN in rows of padding.
    """

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        num_positions = values.shape[0]
        kwargs: dict[str, Any] = {"clamped_count": None, "fmt": FORMATS[values.dtype], **more}
        if padding is not None:
            num_tokens = ceil_div(num_positions, 2 * NUM_TOPK if beyond else NUM_TOPK)
            kwargs["pos_to_token_topk"] = segments(num_positions, padding)(device)
            kwargs["topk_weights"] = torch.rand(num_tokens, NUM_TOPK, device=device)
        if experts:
            expert = torch.arange(num_positions, dtype=torch.int32, device=device)
            kwargs["pos_to_expert"] = torch.where(expert % 5 == 3, -1, expert)
        if counted:
            kwargs["clamped_count"] = torch.tensor([7, 2**40, 0], device=device)
        values = values.masked_fill(~real_rows(kwargs, num_positions, values.device).unsqueeze(1), torch.nan)
        storage = torch.cat((values.new_zeros(first_element), values.flatten()))
        return {"x": storage[first_element:].view(values.shape), **kwargs}

    return build


def real_rows(kwargs: dict[str, Any], num_positions: int, device: torch.device) -> torch.Tensor:
    """bool (num_positions,): rows that are not padding."""
    maps = (kwargs.get(name) for name in ("pos_to_token_topk", "topk_weights", "pos_to_expert"))
    return real_positions(num_positions, *maps, device)


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Real rows of x; maps, weights and the output."""
    x, out = kwargs["x"], outputs[0] if isinstance(outputs, tuple) else outputs
    maps = [kwargs.get(name) for name in ("pos_to_token_topk", "topk_weights", "pos_to_expert")]
    num_real = int(real_rows(kwargs, x.shape[0], x.device).sum())
    once = sum(each.numel() * each.element_size() for each in (out, *maps) if each is not None)
    return once + num_real * x.shape[1] * x.element_size()


def _case(dtype: torch.dtype, num_positions: int, hidden: int, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{'bf16' if dtype is _BF16 else 'fp32'}-h{hidden}-t{num_positions}{suffix}"
    made = make(activations(num_positions, 2 * hidden, dtype), **more)
    return Case(name, made, **dict.fromkeys(roles.split(), True))


def _bench(num_positions: int, hidden: int, roles: str = "bench", suffix: str = "-bench", **more: Any) -> Case:
    dtype = more.pop("dtype", _BF16)
    made = make(activations(num_positions, 2 * hidden, dtype), padding=(8, 136), **more)
    prefix = "bf16" if dtype is _BF16 else "fp32"
    name = f"{prefix}-h{hidden}-t{num_positions}{suffix}"
    return Case(name, made, gpu=False, **dict.fromkeys(roles.split(), True))


SPEC = OpSpec(
    op=swiglu_forward,
    reference=reference.swiglu_forward,
    least_bytes=least_bytes,
    mutates=("clamped_count",),
    cases=(
        # One tile or several along a row; with and without the optional arguments.
        _case(_BF16, 7, 256, "-plain", "small modes"),
        _case(_BF16, 33, 64, "-weights", "small", padding=(2, 7)),
        _case(_BF16, 33, 320, "-experts", "small compile", experts=True),
        _case(_BF16, 33, 128, "-all", "small modes", padding=(2, 7), experts=True),
        _case(_BF16, 33, 128, "-beyond", "small", padding=(2, 7), beyond=True),
        _case(_BF16, 9, 2112, "-clamped", "small compile", padding=(1, 4), swiglu_clamp_value=1.5),
        _case(_BF16, 33, 192, "-counted", "small modes", experts=True, swiglu_clamp_value=0.7, counted=True),
        _case(_BF16, 9, 2112, "-counted", "small compile", padding=(1, 4), swiglu_clamp_value=2, counted=True),
        _case(_BF16, 9, 192, "-to-fp32", "small compile", padding=(1, 4), fmt="fp32"),
        _case(_FP32, 9, 192, "-plain", "small"),
        _case(_FP32, 9, 192, "-to-bf16", "small compile", padding=(1, 4), fmt="bf16"),
        _case(_FP32, 33, 640, "-counted", "small compile", padding=(1, 4), swiglu_clamp_value=0.5, counted=True),
        # Zero rows, one row; a view that starts at an odd element.
        _case(_BF16, 0, 128, "", "small", padding=(1, 4)),
        _case(_BF16, 0, 128, "-counted", "small", swiglu_clamp_value=1.0, counted=True),
        _case(_BF16, 1, 640, "", "small"),
        _case(_BF16, 9, 128, "-unaligned", "small", padding=(1, 4), first_element=1),
        _case(_FP32, 9, 128, "-unaligned", "small", first_element=1),
        # Zeros, infinity, NaN, subnormals, random bits; every possible gate.
        *(
            Case(f"{name}-h256-extremes{'-clamped' * bool(more)}", make(extremes(512, dtype), **more), small=True)
            for name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for more in ({}, {"swiglu_clamp_value": 3.3, "counted": True})
        ),
        Case("bf16-h128-every-gate", make(every_gate)),
        # Sizes of real models.
        *(
            _case(_BF16, num_positions, hidden, padding=(8, 136))
            for num_positions, hidden in ((4001, 640), (8001, 2048), (17, 3072), (4001, 7168), (3, 40960))
        ),
        _case(_BF16, 8001, 2048, "-counted", padding=(8, 136), experts=True, swiglu_clamp_value=2.0, counted=True),
        _case(_FP32, 4001, 2048, padding=(8, 136)),
        # More than 2**31 elements.
        _case(_BF16, 300001, 4096, "-large", padding=(299000, 300000)),
        # Benchmarks.
        _bench(34816, 2048, "bench model_shape compile"),
        _bench(34816, 2048, suffix="-clamped-counted-bench", swiglu_clamp_value=10.0, counted=True),
        _bench(34816, 2048, dtype=_FP32, roles="bench compile"),
        *(_bench(34816, hidden) for hidden in (256, 640, 1536, 7168)),
        *(_bench(num_positions, 2048) for num_positions in (64, 4001)),
    ),
)
