"""The calls of this package's ops that a model with Engram layers makes; `tk warmup` compiles their kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

import tk_engram as engram
from tk_core.arch import get_arch
from tk_core.cli.profile import Call, call, empty
from tk_engram.lookup.engram_lookup import GROUP, lookup_kernel_for
from tk_engram.sizes import NUM_PARTIALS

Dtype = Literal["bfloat16", "float32"]

_EPS = 1e-6  # neither eps nor clamp_value is part of a kernel


@dataclass(frozen=True)
class Profile:
    """Section [tk_engram] of a model's profile."""

    hidden: int
    mhc_mult: int = 4
    """Residual streams."""
    max_ngram: int = 3
    num_heads: int = 8
    """Tables of each order of n-gram."""
    head_dim: int = 64
    """Channels of a row of a table."""
    tables: tuple[Literal["bfloat16", "e4m3_float32", "e4m3_ue8m0", "e4m3_ue8m0_beside"], ...] = ("bfloat16",)
    """Formats of tables; with "beside" the exponents of a row follow its codes in memory."""
    table_memory: tuple[Literal["device", "host"], ...] = ("device",)
    weights: tuple[Dtype, ...] = ("bfloat16",)
    """Dtypes of the weights of norms and convolutions."""
    packed: tuple[bool, ...] = (False,)
    """Whether several sequences lie in one batch, told apart by cu_seqlens."""
    decoding: bool = True
    """Whether sequences go on from a history of ids and a state of the convolution."""
    image_masks: tuple[bool, ...] = (False,)
    """Whether a mask marks tokens of images."""
    gate_residuals: tuple[bool, ...] = (False,)
    """Whether the gate adds to the streams itself, as it does where no convolution follows."""
    convolution: bool = True
    """Whether a short convolution follows the gate."""
    training: bool = False
    """Whether backwards and the tables' optimizer are called too."""
    momentum: tuple[Dtype, ...] = ("float32",)
    """Dtypes of the optimizer's buffer."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    yield from _lookups(profile, num_tokens)
    yield from _gates(profile, num_tokens)
    if profile.convolution:
        yield from _convolutions(profile, num_tokens)
    if profile.training:
        yield from _optimizer(profile)


def _streams(profile: Profile, num_tokens: int) -> torch.Tensor:
    return empty(num_tokens, profile.mhc_mult, profile.hidden, dtype=torch.bfloat16)


def _weight(profile: Profile, dtype: str) -> torch.Tensor:
    return empty(profile.mhc_mult, profile.hidden, dtype=dtype)


def _sequences(profile: Profile) -> Iterator[torch.Tensor | None]:
    for packed in profile.packed:
        yield empty(3, dtype=torch.int32) if packed else None


def _masks(profile: Profile, num_tokens: int) -> Iterator[torch.Tensor | None]:
    for masked in profile.image_masks:
        yield empty(num_tokens, dtype=torch.bool) if masked else None


def _lookups(profile: Profile, num_tokens: int) -> Iterator[Call]:
    max_ngram, num_heads = profile.max_ngram, profile.num_heads
    num_columns = (max_ngram - 1) * num_heads
    token_ids = empty(num_tokens, dtype=torch.int32)
    for cu_seqlens in _sequences(profile):
        num_sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        history = empty(num_sequences, max_ngram - 1, dtype=torch.int32)
        for before in (None, history) if profile.decoding else (None,):
            yield call(engram.ngram_windows, token_ids, cu_seqlens, max_ngram, 0, history=before)
    windows, multipliers = empty(num_tokens, max_ngram, dtype=torch.int32), empty(1, max_ngram, dtype=torch.int64)
    sizes, offsets = (empty(1, *shape, dtype=torch.int32) for shape in ((max_ngram - 1, num_heads), (num_columns,)))
    for mask in _masks(profile, num_tokens):
        yield call(engram.engram_hash, windows, multipliers, sizes, offsets, image_token_mask=mask)
    indices = empty(num_tokens, num_columns, dtype=torch.int32)
    for kind, memory in product(profile.tables, profile.table_memory):
        table, table_sf = _table(profile, kind)
        if memory == "device":
            yield call(engram.engram_lookup, indices, table, table_sf=table_sf)
        else:
            yield call(engram_lookup, table, table_sf)
    if profile.training:
        d_o = empty(num_tokens, num_columns, profile.head_dim, dtype=torch.bfloat16)
        for grad in ({}, {"grad": empty(16, profile.head_dim)}, {"sparse": True}):
            yield call(engram.engram_lookup_bwd, d_o, indices, 16, **grad)


def _table(profile: Profile, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_rows, dim = 16, profile.head_dim
    if kind == "bfloat16":
        return empty(num_rows, dim, dtype=torch.bfloat16), None
    if kind == "e4m3_ue8m0_beside":
        both = empty(num_rows, dim + dim // GROUP, dtype=torch.uint8)
        return both[:, :dim].view(torch.float8_e4m3fn), both[:, dim:]
    sf_dtype = torch.float32 if kind == "e4m3_float32" else torch.uint8
    return empty(num_rows, dim, dtype=torch.float8_e4m3fn), empty(num_rows, dim // GROUP, dtype=sf_dtype)


def engram_lookup(table: torch.Tensor, table_sf: torch.Tensor | None) -> None:
    """Ask for the kernel that reads a table in pinned memory: no tensor of the meta device stands for such a table."""
    lookup_kernel_for(table, table_sf, True, get_arch(table.device))


def _gates(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult, x = profile.mhc_mult, _streams(profile, num_tokens)
    kv = empty(num_tokens, mhc_mult + 1, profile.hidden, dtype=torch.bfloat16)
    for dtype in profile.weights:
        weights = _weight(profile, dtype), _weight(profile, dtype)
        yield call(engram.fused_weight, *weights)
        if profile.training:
            partial, grads = empty(1, mhc_mult, profile.hidden), (_weight(profile, "float32") for _ in weights)
            yield call(engram.grad_w_reduce, partial, *weights, *grads)
    inputs = x, kv[:, :mhc_mult], kv[:, mhc_mult], _weight(profile, "float32")
    saved = [empty(num_tokens, mhc_mult) for _ in range(4)]
    for mask, add_residual in product(_masks(profile, num_tokens), profile.gate_residuals):
        options = {"image_token_mask": mask, "add_residual": add_residual}
        for save in (False, True) if profile.training else (False,):
            yield call(engram.engram_gate_fwd, *inputs, _EPS, _EPS, save, **options)
        if profile.training:
            for grad_kv in (None, kv):
                yield call(engram.engram_gate_bwd, x, *inputs, *saved, _EPS, **options, grad_kv=grad_kv)


def _convolutions(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult, hidden, dilation = profile.mhc_mult, profile.hidden, profile.max_ngram
    u = _streams(profile, num_tokens)
    for cu_seqlens, dtype in product(_sequences(profile), profile.weights):
        inputs = u, _weight(profile, dtype), empty(mhc_mult, hidden, 4, dtype=dtype)
        options = {"cu_seqlens": cu_seqlens, "dilation": dilation}
        num_sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        kept = empty(num_sequences, 3 * dilation, mhc_mult, hidden, dtype=torch.bfloat16)
        for state, residual in product((None, kept) if profile.decoding else (None,), (None, u)):
            yield call(engram.short_conv, *inputs, **options, state=state, residual=residual)
        if profile.training:
            for has_residual in (False, True):
                yield call(engram.short_conv_bwd, u, *inputs, **options, has_residual=has_residual)


def _optimizer(profile: Profile) -> Iterator[Call]:
    """Steps on a table, whatever its number of rows."""
    num_rows, width = 16, profile.head_dim
    matrix, rows, columns = empty(num_rows, width), empty(num_rows), empty(width)
    for dtype in profile.momentum:
        yield call(engram.engram_sinkhorn_momentum_update, matrix, empty(num_rows, width, dtype=dtype), 0.9)
    yield call(engram.engram_sinkhorn_step, matrix, rows, columns, _EPS)
    yield call(engram.engram_sinkhorn_step_reduce, empty(NUM_PARTIALS, width), columns)
    yield call(engram.engram_sinkhorn_finalize, matrix, rows, columns, _EPS, 1.0)
