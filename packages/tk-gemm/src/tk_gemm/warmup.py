"""The calls that a model in FP8 makes of this package's ops; `tk warmup` compiles the kernels of these."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

import tk_gemm as gemm
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout, empty_scales

Call = tuple[Any, dict[str, Any]]
Pair = tuple[torch.Tensor, torch.Tensor]
Weight = tuple[int, int]

_BLOCK = 128


@dataclass(frozen=True)
class Profile:
    """Section [tk_gemm] of a model's profile."""

    num_experts: int
    num_topk: int
    """Routed experts of a token."""
    experts: tuple[Weight, ...] = ()
    """N and K of the weights that each expert has."""
    dense: tuple[Weight, ...] = ()
    """N and K of the weights that every token is multiplied with."""
    layouts: tuple[Literal["ids", "psum", "masked"], ...] = ("ids",)
    """What tells experts' rows apart: an id for each row, the rows at which experts end, or a buffer each."""
    sf_layouts: tuple[Literal["row_major", "col_major"], ...] = ("col_major",)
    """Layouts of the activations' scale factors."""
    outputs: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    """Dtypes of dense products."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    for (num_cols, num_channels), layout in product(profile.dense, profile.sf_layouts):
        a, b = _activations(num_tokens, num_channels, layout), _weights(num_cols, num_channels)
        for dtype in profile.outputs:
            d = torch.empty((num_tokens, num_cols), dtype=getattr(torch, dtype), device="meta")
            yield gemm.fp8_gemm_nt, {"a": a, "b": b, "d": d}
    for (num_cols, num_channels), layout in product(profile.experts, profile.sf_layouts):
        b = _weights(num_cols, num_channels, profile.num_experts)
        yield from _contiguous(profile, num_tokens, num_channels, layout, b)
        if "masked" in profile.layouts:
            yield gemm.m_grouped_fp8_gemm_nt_masked, _masked(profile, num_tokens, num_channels, layout, b)


def _activations(num_rows: int, num_channels: int, layout: str) -> Pair:
    data = torch.empty((num_rows, num_channels), dtype=torch.float8_e4m3fn, device="meta")
    return data, empty_scales(data, num_rows, num_channels // _BLOCK, ScaleLayout(layout))


def _weights(num_cols: int, num_channels: int, *groups: int) -> Pair:
    data = torch.empty((*groups, num_cols, num_channels), dtype=torch.float8_e4m3fn, device="meta")
    return data, torch.empty((*groups, ceil_div(num_cols, _BLOCK), num_channels // _BLOCK), device="meta")


def _contiguous(profile: Profile, num_tokens: int, num_channels: int, layout: str, b: Pair) -> Iterator[Call]:
    """With the fewest rows in which all pairs of a token and an expert have a place, and with the most."""
    num_pairs = num_tokens * profile.num_topk
    most = (num_pairs + (_BLOCK - 1) * profile.num_experts) // _BLOCK * _BLOCK
    for num_rows, kind in product((align(num_pairs, _BLOCK), most), profile.layouts):
        if kind == "masked":
            continue
        with_psum = kind == "psum"
        size = profile.num_experts if with_psum else num_rows
        groups = torch.empty(size, dtype=torch.int32, device="meta")
        arguments = {"a": _activations(num_rows, num_channels, layout), "b": b, "d": None, "grouped_layout": groups}
        yield gemm.m_grouped_fp8_gemm_nt_contiguous, {**arguments, "use_psum_layout": with_psum}


def _masked(profile: Profile, num_tokens: int, num_channels: int, layout: str, b: Pair) -> dict[str, Any]:
    """A buffer that has room for every token, of which the experts get equal shares."""
    num_rows = align(num_tokens, 4)  # on 16 bytes for each expert's scale factors
    data, sf = _activations(profile.num_experts * num_rows, num_channels, layout)
    shape = profile.num_experts, num_rows
    counts = torch.empty(profile.num_experts, dtype=torch.int32, device="meta")
    expected = ceil_div(num_tokens * profile.num_topk, profile.num_experts)
    a = data.unflatten(0, shape), sf.unflatten(0, shape)
    return {"a": a, "b": b, "d": None, "masked_m": counts, "expected_m": expected}
