"""The calls that a model makes to this package's ops; `tk warmup` compiles the kernels they need."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

import tk_gemm as gemm
from tk_core.cli.profile import Call, call, empty
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout, empty_scales
from tk_gemm.check import BLOCK, Pair

Weight = tuple[int, int]


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
    routers: tuple[Weight, ...] = ()
    """N and K of the routers' float32 weights."""
    layouts: tuple[Literal["ids", "psum", "masked"], ...] = ("ids",)
    """How rows are assigned to experts: an id for each row, the rows at which experts end, or a buffer each."""
    sf_layouts: tuple[Literal["row_major", "col_major", "packed_ue8m0"], ...] = ("col_major",)
    """Layouts of the activations' scale factors; packed_ue8m0, the weights' too, is for Blackwell."""
    outputs: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    """Dtypes of dense products."""
    accumulate: tuple[bool, ...] = (False,)
    """Whether dense products are added to a matrix c."""
    operands: tuple[Literal["e4m3", "bfloat16"], ...] = ("e4m3",)
    """Dtypes of activations and weights."""
    orders: tuple[Literal["nt", "nn", "tn", "tt"], ...] = ("nt",)
    """How the operands of BF16 products lie: bf16_gemm_nt, or its views."""
    swiglu: bool = False
    """Experts' products fused with SwiGLU and the cast too, where N is a multiple of 256, with and without weights."""
    swiglu_clamps: tuple[bool, ...] = (False,)
    """Whether the SwiGLU clamps its input."""
    training: bool = False
    """Gradients of experts' weights too, in both forms of FP8 operands, written or added to what is there."""
    gradients: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """Dtypes of these gradients."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    if "e4m3" in profile.operands:
        yield from _fp8_calls(profile, num_tokens)
    if "bfloat16" in profile.operands:
        yield from _bf16_calls(profile, num_tokens)
    for num_cols, num_channels in profile.routers:
        yield call(gemm.router_gemm_nt, _bf16(num_tokens, num_channels), empty(num_cols, num_channels))


def _k_grouped(profile: Profile, num_tokens: int, *shape: int) -> Iterator[tuple[int, dict[str, torch.Tensor | None]]]:
    """Rows of all experts together, and the arguments of gradients of this shape other than the operands."""
    if profile.training:
        ends = empty(profile.num_experts, dtype=torch.int32)
        total = align(num_tokens * profile.num_topk, BLOCK)
        for dtype in profile.gradients:
            d = empty(profile.num_experts, *shape, dtype=dtype)
            yield from ((total, {"d": d, "ks": ends, "c": c}) for c in (None, d))


def _fp8_calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    for (num_cols, num_channels), layout in product(profile.dense, profile.sf_layouts):
        a, b = _activations(num_tokens, num_channels, layout), _weights(num_cols, num_channels, layout)
        for outputs in _results(profile, num_tokens, num_cols):
            yield call(gemm.fp8_gemm_nt, a, b, *outputs)
    for (num_cols, num_channels), layout in product(profile.experts, profile.sf_layouts):
        b = _weights(num_cols, num_channels, layout, profile.num_experts)
        for num_rows, groups, with_psum in _contiguous(profile, num_tokens):
            a = _activations(num_rows, num_channels, layout)
            yield call(gemm.m_grouped_fp8_gemm_nt_contiguous, a, b, None, groups, use_psum_layout=with_psum)
            if profile.swiglu and num_cols % (2 * BLOCK) == 0:
                weighted = empty(num_rows, dtype=torch.int32), empty(1, 1)
                for clamps, maps in product(profile.swiglu_clamps, ((None, None), weighted)):
                    options = *maps, 10.0 if clamps else None, with_psum
                    yield call(gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous, a, b, groups, *options)
        for num_rows, grouping in _masked(profile, num_tokens):
            data, sf = _activations(profile.num_experts * num_rows, num_channels, layout)
            shape = profile.num_experts, num_rows
            a = data.unflatten(0, shape), sf.unflatten(0, shape)
            yield call(gemm.m_grouped_fp8_gemm_nt_masked, a, b, None, *grouping)
    layouts = {"packed_ue8m0" if layout == "packed_ue8m0" else "col_major": None for layout in profile.sf_layouts}
    for shape, layout in product(profile.experts, layouts):
        for total, arguments in _k_grouped(profile, num_tokens, *shape):
            pairs = [_activations(rows, total, layout) for rows in shape]
            for a, b in ([(data, sf.t()) for data, sf in pairs], [(data.view(-1), sf) for data, sf in pairs]):
                yield call(gemm.k_grouped_fp8_gemm_nt_contiguous, a, b, **arguments)


def _bf16_calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    for (num_cols, num_channels), order in product(profile.dense, profile.orders):
        num_rows = num_tokens if order[0] == "n" else align(num_tokens, 8)  # transposed, columns are on 16 bytes
        a = _bf16(num_rows, num_channels, is_transposed=order[0] == "t")
        b = _bf16(num_cols, num_channels, is_transposed=order[1] == "n")
        for outputs in _results(profile, num_rows, num_cols):
            yield call(gemm.bf16_gemm_nt, a, b, *outputs)
    for (num_cols, num_channels), order in product(profile.experts, [x for x in profile.orders if x[0] == "n"]):
        b = _bf16(profile.num_experts, num_cols, num_channels, is_transposed=order == "nn")
        for num_rows, groups, with_psum in _contiguous(profile, num_tokens):
            a = _bf16(num_rows, num_channels)
            yield call(gemm.m_grouped_bf16_gemm_nt_contiguous, a, b, None, groups, use_psum_layout=with_psum)
        for num_rows, grouping in _masked(profile, num_tokens):
            a = _bf16(profile.num_experts, num_rows, num_channels)
            yield call(gemm.m_grouped_bf16_gemm_nt_masked, a, b, None, *grouping)
    for shape in profile.experts:
        for total, arguments in _k_grouped(profile, num_tokens, *shape):
            a, b = (_bf16(total, rows) for rows in shape)
            yield call(gemm.k_grouped_bf16_gemm_tn_contiguous, a, b, **arguments)


def _bf16(*shape: int, is_transposed: bool = False) -> torch.Tensor:
    """A tensor of this shape, or transposed, a view of one that has its last two dimensions the other way round."""
    if is_transposed:
        return _bf16(*shape[:-2], shape[-1], shape[-2]).mT
    return empty(*shape, dtype=torch.bfloat16)


def _results(profile: Profile, num_tokens: int, num_cols: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """d and c."""
    for dtype, accumulates in product(profile.outputs, profile.accumulate):
        d = empty(num_tokens, num_cols, dtype=dtype)
        yield d, d if accumulates else None


def _activations(num_rows: int, num_channels: int, layout: str) -> Pair:
    data = empty(num_rows, num_channels, dtype=torch.float8_e4m3fn)
    return data, empty_scales(data, num_rows, num_channels // BLOCK, ScaleLayout(layout))


def _weights(num_cols: int, num_channels: int, layout: str, *groups: int) -> Pair:
    data = empty(*groups, num_cols, num_channels, dtype=torch.float8_e4m3fn)
    shape = *groups, ceil_div(num_cols, BLOCK)
    if layout == "packed_ue8m0":
        return data, empty(*shape, ceil_div(num_channels, 4 * BLOCK), dtype=torch.int32)
    return data, empty(*shape, num_channels // BLOCK)


def _contiguous(profile: Profile, num_tokens: int) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """Rows, grouped_layout, use_psum_layout: with the fewest rows that have room for all pairs, and the most."""
    num_pairs = num_tokens * profile.num_topk
    most = (num_pairs + (BLOCK - 1) * profile.num_experts) // BLOCK * BLOCK
    for num_rows, kind in product((align(num_pairs, BLOCK), most), profile.layouts):
        if kind != "masked":
            size = profile.num_experts if kind == "psum" else num_rows
            yield num_rows, empty(size, dtype=torch.int32), kind == "psum"


def _masked(profile: Profile, num_tokens: int) -> Iterator[tuple[int, tuple[torch.Tensor, int]]]:
    """Rows of a buffer that has room for every token, and masked_m and expected_m for equal shares of the experts."""
    if "masked" in profile.layouts:
        counts = empty(profile.num_experts, dtype=torch.int32)
        expected = ceil_div(num_tokens * profile.num_topk, profile.num_experts)
        # A multiple of 4, so that each expert's scale factors are on 16 bytes.
        yield align(num_tokens, 4), (counts, expected)
