"""The calls of this package's ops that a model with Engram layers makes; `tk warmup` compiles their kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

import tk_engram as engram
from tk_core import check
from tk_core.arch import get_arch
from tk_core.cli.profile import Call, empty
from tk_engram.lookup.engram_lookup import GROUP, VECTOR, EngramLookupConfig, _engram_lookup_kernel
from tk_engram.optimizer.engram_sinkhorn_step import NUM_PARTIALS

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


def _num_columns(profile: Profile) -> int:
    return (profile.max_ngram - 1) * profile.num_heads


def _lookups(profile: Profile, num_tokens: int) -> Iterator[Call]:
    max_ngram, num_columns = profile.max_ngram, _num_columns(profile)
    for cu_seqlens in _sequences(profile):
        num_sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        history = empty(num_sequences, max_ngram - 1, dtype=torch.int32)
        for before in (None, history) if profile.decoding else (None,):
            ids = {"token_ids": empty(num_tokens, dtype=torch.int32), "cu_seqlens": cu_seqlens, "history": before}
            yield engram.ngram_windows, {**ids, "N": max_ngram, "pad_id": 0}
    for mask in _masks(profile, num_tokens):
        yield (
            engram.engram_hash,
            {
                "ngram_token_ids": empty(num_tokens, max_ngram, dtype=torch.int32),
                "multipliers": empty(1, max_ngram, dtype=torch.int64),
                "vocab_sizes": empty(1, max_ngram - 1, profile.num_heads, dtype=torch.int32),
                "offsets": empty(1, num_columns, dtype=torch.int32),
                "image_token_mask": mask,
            },
        )
    indices = empty(num_tokens, num_columns, dtype=torch.int32)
    for kind, memory in product(profile.tables, profile.table_memory):
        table, table_sf = _table(profile, kind)
        if memory == "device":
            yield engram.engram_lookup, {"indices": indices, "table": table, "table_sf": table_sf}
        else:
            yield engram_lookup, {"table": table, "table_sf": table_sf}
    if profile.training:
        d_o = empty(num_tokens, num_columns, profile.head_dim, dtype=torch.bfloat16)
        for grad in ({}, {"grad": empty(16, profile.head_dim)}, {"sparse": True}):
            yield engram.engram_lookup_bwd, {"d_o": d_o, "indices": indices, "num_rows": 16, **grad}


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
    arch, dim = get_arch(table.device), table.shape[1]
    vector = min(VECTOR, check.row_alignment(table) // table.itemsize)
    sf_dtype = None if table_sf is None else table_sf.dtype
    _engram_lookup_kernel(dim, table.dtype, sf_dtype, vector, True, EngramLookupConfig.best(dim, arch), arch)


def _gates(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult, x = profile.mhc_mult, _streams(profile, num_tokens)
    kv = empty(num_tokens, mhc_mult + 1, profile.hidden, dtype=torch.bfloat16)
    pairs = {"k": kv[:, :mhc_mult], "v": kv[:, mhc_mult]}
    for dtype in profile.weights:
        weights = {"weight_hidden": _weight(profile, dtype), "weight_embed": _weight(profile, dtype)}
        yield engram.fused_weight, weights
        if profile.training:
            grads = {f"grad_{name}": _weight(profile, "float32") for name in weights}
            yield engram.grad_w_reduce, {"grad_w_partial": empty(1, mhc_mult, profile.hidden), **weights, **grads}
    fused = {"weight_fused": _weight(profile, "float32"), "clamp_value": _EPS}
    for mask, add_residual in product(_masks(profile, num_tokens), profile.gate_residuals):
        options = {"image_token_mask": mask, "add_residual": add_residual}
        inputs = {"hidden_states": x, **pairs, **fused, **options}
        for save in (False, True) if profile.training else (False,):
            yield engram.engram_gate_fwd, {**inputs, "eps": _EPS, "save_for_backward": save}
        if profile.training:
            saved = {name: empty(num_tokens, mhc_mult) for name in ("dot", "gate_score", "rstd_x", "rstd_k")}
            for grad_kv in (None, kv):
                yield engram.engram_gate_bwd, {"grad_out": x, **inputs, **saved, "grad_kv": grad_kv}


def _convolutions(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult, hidden, dilation = profile.mhc_mult, profile.hidden, profile.max_ngram
    u = _streams(profile, num_tokens)
    for cu_seqlens, dtype in product(_sequences(profile), profile.weights):
        weights = {
            "norm_weight": _weight(profile, dtype),
            "conv_weight": empty(mhc_mult, hidden, 4, dtype=dtype),
        }
        inputs = {"u": u, **weights, "cu_seqlens": cu_seqlens, "dilation": dilation}
        num_sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        kept = empty(num_sequences, 3 * dilation, mhc_mult, hidden, dtype=torch.bfloat16)
        for state, residual in product((None, kept) if profile.decoding else (None,), (None, u)):
            yield engram.short_conv, {**inputs, "state": state, "residual": residual}
        if profile.training:
            for has_residual in (False, True):
                yield engram.short_conv_bwd, {"d_out": u, **inputs, "has_residual": has_residual}


def _optimizer(profile: Profile) -> Iterator[Call]:
    """Steps on a table, whatever its number of rows."""
    num_rows, width = 16, profile.head_dim
    matrix, rows, columns = empty(num_rows, width), empty(num_rows), empty(width)
    for dtype in profile.momentum:
        buffer = empty(num_rows, width, dtype=dtype)
        yield engram.engram_sinkhorn_momentum_update, {"grad": matrix, "momentum_buffer": buffer, "beta1": 0.9}
    scales = {"row_scale": rows, "col_scale": columns, "eps": _EPS}
    yield engram.engram_sinkhorn_step, {"matrix": matrix, **scales}
    partials = {"col_sumsq_partial": empty(NUM_PARTIALS, width), "col_sumsq": columns}
    yield engram.engram_sinkhorn_step_reduce, partials
    yield engram.engram_sinkhorn_finalize, {"matrix": matrix, **scales, "alpha": 1.0}
