"""Every op refuses, by a TypeError or ValueError that names the argument, what it can't take.

Of a tensor, that is each dtype, number of dimensions and kind of strides that no case of the op has: whatever an op
takes, a case covers. The ops' own tests have the ranges and combinations of arguments.
"""

import inspect
import math
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tk_core.testing import OpSpec, load_specs
from tk_core.testing.trees import map_tensors, tensors, transfer

SPECS = load_specs()
# Integers of which any positive one will do: more splits or rows than there are count as all, positions outside of the
# cache have results, too, there are 2⁶³ draws, and a seed is any 64 bits.
UNBOUNDED = {"n_splits", "expected_m", "expected_m_for_psum_layout", "seqlen_offset", "random_offset", "seed"}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)
# Argument and respect in which an op takes more than its cases have: bits are copied whatever their dtype; rows may lie
# apart where they are read or written by their stride, or copied first; a scale may have any shape of one element; a
# number may be an int or a tensor.
ALSO_TAKEN = {
    *(
        "tk_quant.transpose x dtype",
        "tk_quant.batched_transpose x dtype",
        "tk_quant.per_token_cast_back tensor_sf dims",
    ),
    *("tk_gemm.bf16_gemm_nt d strides", "tk_gemm.bf16_gemm_nt c strides", "tk_gemm.fp8_gemm_nt a strides"),
    *("tk_gemm.fp8_gemm_nt b strides", "tk_gemm.fp8_gemm_nt d strides", "tk_gemm.fp8_gemm_nt c strides"),
    *(f"tk_gemm.k_grouped_bf16_gemm_tn_contiguous {name} strides" for name in "ab"),
    *(f"tk_gemm.k_grouped_fp8_gemm_nt_contiguous {name} strides" for name in "ab"),
    *(f"tk_gemm.m_grouped_bf16_gemm_nt_contiguous {name} strides" for name in "ad"),
    *(f"tk_gemm.m_grouped_fp8_gemm_nt_contiguous {name} strides" for name in "ad"),
    *("tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous a strides", "tk_mhc.mhc_post_pre residual strides"),
    "tk_moe.moe_topk_gate_forward random_offset type",
    *("tk_moe.top2_sum_gate unmapped_topk_idx strides", "tk_quant.cast_back_e5m6 x strides"),
    "tk_quant.per_token_cast_with_sf_only tensor_sf dims",
    *(f"tk_quant.norm_forward_and_per_token_cast {what}" for what in ("out_bf16 strides", "tensor_sf dims")),
    *("tk_quant.per_token_cast_to_e5m6 x strides", "tk_quant.per_channel_cast_fused x strides"),
}
ANY = (TypeError, ValueError)
Error = type[Exception] | tuple[type[Exception], ...]


class Wrong(NamedTuple):
    """A wrong value of an argument, in what respect, and the error that refuses it; () if it may be right after all."""

    respect: str
    value: Any
    error: Error = ()


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).to(dtype)


def wrong_tensors(x: Tensor, seen: list[Tensor], has_others: bool, type_error: Error) -> Iterator[Wrong]:
    """Tensors that differ from x in one respect, and values that are none; `seen`: this argument in all cases."""
    yield Wrong("type", [1, 2], ANY)
    for value in (3, None):
        yield Wrong("type", value, type_error)
    for dtype in set(DTYPES) - {y.dtype for y in seen}:
        yield Wrong("dtype", zeros(x.shape, dtype), type_error)
    yield Wrong("device", x.to("meta"), ValueError if has_others else ())
    only = ValueError if len({y.dim() for y in seen}) == 1 else ()
    yield Wrong("dims", x[None].clone(), only)
    yield Wrong("dims", x[None, None, None, None].clone(), only)
    if x.dim() == 0:
        return
    yield Wrong("dims", zeros(x.shape[1:], x.dtype), only)
    for dim, size in enumerate(x.shape):
        yield Wrong("size", zeros((*x.shape[:dim], size + 1, *x.shape[dim + 1 :]), x.dtype))
        if size:
            yield Wrong("size", x.narrow(dim, 0, size - 1).clone())
    wide = zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    if x.shape[-1] > 1:
        dense = all(y.stride(-1) == 1 for y in seen if y.dim() and y.shape[-1] > 1)
        yield Wrong("strides", wide[..., ::2], ValueError if dense else ())
    if x.dim() == 2 and x.shape[0] > 1:
        yield Wrong("strides", wide[:, : x.shape[1]], ValueError if all(y.is_contiguous() for y in seen) else ())


def wrong_values(name: str, value: Any, type_error: Error) -> Iterator[Wrong]:
    """Values of a wrong type or range in place of a value that is no tensor."""
    types, refused, maybe = (), (), ()
    match value:
        case bool():
            types = (0, 1, 2.0, "yes", [True], None)
        case Enum() | str():
            refused = ("none such", [value], -1, 2**31, 2**70, b"e4m3")
        case int():
            types, refused, maybe = (float(value), True, "1", [value], 1j), (-(2**70), 2**31, 2**70), (-1,)
            if name in UNBOUNDED:
                refused, maybe = (-(2**70),), (-1, 2**31, 2**70)
        case float():
            types, maybe = (True, "1", [value], 1j), (math.nan, math.inf, 10**400)
        case torch.dtype():
            types = ("int64", int, None, torch.complex64)
        case tuple() if all(isinstance(item, int) for item in value):
            types, maybe = (value[0], "32", tuple(map(float, value))), ((0, 0), (-1, 32), (32,), (1, 2, 3))
        case None:
            refused = ("none such", 1j, [object()])
    for error, values in ((type_error, types), (ANY, refused), ((), maybe)):
        yield from (Wrong("value", each, error) for each in values)


def wrong_arguments(spec: OpSpec) -> Iterator[tuple[dict[str, Any], str, Wrong]]:
    """(good arguments, name of the one to replace, by what)."""
    made = [(case.make("cpu") if case.small else None, case.make("meta")) for case in spec.cases]
    for name, parameter in inspect.signature(spec.op).parameters.items():
        annotation = str(parameter.annotation)
        seen = [(kwargs, meta[name]) for kwargs, meta in made if meta.get(name) is not None]
        kwargs = next((kwargs for kwargs, _ in seen if kwargs), next(kwargs for kwargs, _ in made if kwargs))
        value = kwargs.get(name, parameter.default)
        like = [other for _, other in seen if type(other) is type(value)]
        has_others = bool(tensors([other for key, other in kwargs.items() if key != name]))
        if isinstance(value, Tensor):
            for wrong in wrong_tensors(value, like, has_others, ANY if "tuple" in annotation else TypeError):
                if wrong.value is not None or "None" not in annotation:
                    yield kwargs, name, wrong
        elif isinstance(value, tuple) and isinstance(value[0], Tensor):
            for i, x in enumerate(value):
                if x is None:
                    continue
                for respect, wrong, error in wrong_tensors(x, [pair[i] for pair in like], True, ANY):
                    yield kwargs, name, Wrong(respect, (*value[:i], wrong, *value[i + 1 :]), error)
        elif value is not parameter.empty:
            value = float(value) if "float" in annotation and value is not None else value
            yield from (
                (kwargs, name, wrong) for wrong in wrong_values(name, value, ANY if "None" in annotation else TypeError)
            )


@pytest.mark.parametrize("name", SPECS)
def test_bad_arguments(name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    problems = []
    for kwargs, argument, wrong in wrong_arguments(spec):
        what = f"{name} {argument} {wrong.respect}"
        try:
            spec.op(**{**transfer(kwargs), argument: wrong.value})
        except Exception as error:
            subject, colon, _ = str(error).partition(":")
            named = colon and any(each in subject for each in inspect.signature(spec.op).parameters)
            if not named or not isinstance(error, wrong.error or ANY) or type(error) not in ANY:
                problems.append(f"{what}: {describe(wrong.value)}: {type(error).__name__}: {str(error)[:150]}")
        else:
            if wrong.error and what not in ALSO_TAKEN:
                problems.append(f"{what}: {describe(wrong.value)} accepted")
    assert not problems, "\n".join(problems)


def describe(value: Any) -> str:
    """A value in a few words."""
    return str(map_tensors(lambda x: f"{x.dtype}{tuple(x.shape)}", value))
