"""The calls that a quantized model makes of this package's ops; `tk warmup` compiles the kernels of these."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

import tk_quant as quant
from tk_core.cli.profile import Call, call, empty
from tk_core.math import align, ceil_div
from tk_core.scales import ScaleLayout, empty_scales
from tk_quant.cast.format import data_output

Layout = Literal["row_major", "col_major", "packed_ue8m0", "packed_row_major", "swizzled"]
Block = tuple[int, int]
Dtype = Literal["float32", "bfloat16", "float8_e4m3fn"]

_TOKENS = 128  # tokens of a block of one channel


@dataclass(frozen=True)
class Format:
    """A format of activations, with one scale factor for some channels of a token."""

    fmt: Literal["e4m3", "e2m1", "e5m6"]
    num_per_channels: int = 0
    """Channels that share a scale factor; 0 for all of a token."""
    sf_layouts: tuple[Layout, ...] = ("row_major",)
    round_sf: bool = False
    """Whether scale factors are powers of two in the layouts that may have others."""
    tensor_sf: bool = False
    """Whether scale factors are e4m3, beside one float32 scale for the whole tensor (NVFP4)."""
    e4m3_sf: bool = False
    """Whether scale factors are e4m3 alone."""


@dataclass(frozen=True)
class BlockFormat:
    """A format of weights, with one scale factor for a block."""

    fmt: Literal["e4m3", "e2m1"]
    block: Block
    sf_layouts: tuple[Literal["row_major", "col_major", "packed_ue8m0"], ...] = ("row_major",)
    round_sf: bool = False


@dataclass(frozen=True)
class Rotary:
    """RoPE of queries and keys, in place."""

    rot: int
    """Channels of a head that turn."""
    head_dim: int = 0
    """Channels of a head; 0 for `rot`."""
    interleaved: bool = False
    positions: tuple[Literal["none", "int32", "int64"], ...] = ("int64",)
    batched: tuple[bool, ...] = (False,)
    """Whether queries have a dimension for sequences."""
    normed: tuple[bool, ...] = (False,)
    """Whether RMSNorm of each head comes first, in the same pass."""


@dataclass(frozen=True)
class Swiglu:
    """What a SwiGLU makes of a gate and its value, and where its input has them; the ops' arguments say more."""

    activation: Literal["silu", "swiglu_oai", "gelu_tanh", "relu2"] = "silu"
    alpha: bool = False
    """Whether calls give an alpha."""
    interleaved: bool = False
    gated: bool = True
    clamp_after: bool = False

    @property
    def width(self) -> int:
        """Channels of the input for each channel of the output."""
        return 2 if self.gated else 1

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the ops."""
        return {**vars(self), "alpha": 1.5 if self.alpha else None}


@dataclass(frozen=True)
class Profile:
    """Section [tk_quant] of a model's profile."""

    widths: tuple[int, ...]
    """Channels of the activations that are cast, and of the weights that they are multiplied with."""
    intermediate: tuple[int, ...] = ()
    """Output channels of a SwiGLU."""
    activations: tuple[Format, ...] = ()
    weights: tuple[BlockFormat, ...] = ()
    inputs: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    outputs: tuple[Literal["bf16", "fp32"], ...] = ("bf16",)
    """Formats that quantized tensors are cast back to."""
    num_experts: int = 1
    num_topk: int = 1
    swiglus: tuple[Swiglu, ...] = (Swiglu(),)
    swiglu_clamps: tuple[bool, ...] = (False,)
    """Whether the SwiGLU clamps its input."""
    swiglu_segments: bool = False
    """Whether the SwiGLU is also called with the ends of the experts' rows, aligned to 128, and weights by position."""
    separate_sf: bool = False
    """Whether separate calls also make scale factors alone, and data by given scale factors."""
    recasts: tuple[Block, ...] = ()
    """Block sizes of e4m3 inputs that are cast again, to the formats in `activations`."""
    lossless_blocks: tuple[Block, ...] = ()
    """Block sizes of the e4m3 weights that e2m1 weights with blocks of (1, 32) are cast to."""
    conversions: tuple[tuple[Dtype, Dtype], ...] = ()
    """Pairs of dtypes between which tensors are cast without scale factors."""
    stochastic: bool = False
    """Whether casts by token and those without scale factors round stochastically too, with a seed in memory."""
    cast_and_back: bool = False
    """Whether activations are also cast and cast back in place."""
    rotary: tuple[Rotary, ...] = ()
    norms: tuple[int, ...] = ()
    """Channels of the RMS norms, each with and without a residual."""
    norm_weights: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    norm_rounds_before_weight: bool = True
    """Whether a norm rounds its result before it is multiplied by the weight."""
    training: bool = False
    """Whether backwards, casts by channels and transposes are called too."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    for width, form in product(profile.widths, profile.activations):
        yield from _casts_by_token(profile, form, width, num_tokens)
        yield from _casts_back(profile, form, width, num_tokens)
    for width in profile.widths:
        yield from _weights(profile, width)
        yield from _conversions(profile, width, num_tokens)
    for hidden, form in product(profile.intermediate, profile.activations):
        yield from _swiglu(profile, form, hidden, num_tokens)
    for rotary, dtype in product(profile.rotary, profile.inputs):
        yield from _rotations(profile, rotary, dtype, num_tokens)
    for width, dtype in product(profile.norms, profile.inputs):
        yield from _norms(profile, width, dtype, num_tokens)
    if profile.training:
        for width, dtype in product(profile.widths, profile.inputs):
            yield from _casts_by_channel(profile, width, dtype, num_tokens)
        for hidden in profile.intermediate:
            yield from _swiglu_training(profile, hidden, num_tokens)
            yield from _plain_swiglu_training(profile, hidden, num_tokens)


def _data(fmt: str, num_rows: int, width: int) -> Tensor:
    return data_output("data", None, empty(), num_rows, width, fmt)


def _pair(
    fmt: str, num_rows: int, width: int, block: Block, layout: str = "row_major", sf_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Data, and scale factors of its blocks."""
    data = _data(fmt, num_rows, width)
    num_blocks = ceil_div(num_rows, block[0]), ceil_div(width, block[1])
    return data, empty_scales(data, *num_blocks, ScaleLayout(layout), sf_dtype)


def _flags(layout: str, round_sf: bool) -> dict[str, bool]:
    """The flags for a layout that every op with scale factors has."""
    packed = layout in ("packed_ue8m0", "packed_row_major")
    return {
        "use_tma_aligned_col_major_sf": layout in ("col_major", "packed_ue8m0"),
        "round_sf": round_sf or packed,
        "use_packed_ue8m0": packed,
    }


def _token_options(form: Format, layout: str) -> dict[str, Any]:
    """`_flags`, with use_swizzled_sf and tensor_sf, for the ops that have these two as well."""
    if layout != "swizzled":
        flags = _flags(layout, form.round_sf)
    else:
        flags = {**_flags(layout, not (form.tensor_sf or form.e4m3_sf)), "use_swizzled_sf": True}
    if form.e4m3_sf:
        flags["use_e4m3_sf"] = True
    return {**flags, "tensor_sf": empty(1)} if form.tensor_sf else flags


def _casts_by_token(profile: Profile, form: Format, width: int, num_tokens: int) -> Iterator[Call]:
    group = form.num_per_channels or width
    for dtype, layout in product(profile.inputs, form.sf_layouts):
        x, options = empty(num_tokens, width, dtype=dtype), _token_options(form, layout)
        if form.fmt == "e5m6" and layout != "swizzled":  # per_token_cast_to_e5m6 has no use_swizzled_sf
            yield call(quant.per_token_cast_to_e5m6, x, group, **options)
            continue
        yield call(quant.per_token_cast, x, form.fmt, group, **options)
        if form.fmt == "e5m6":
            continue
        if profile.stochastic:
            seed = empty(1, dtype=torch.int64)
            yield call(quant.per_token_cast, x, form.fmt, group, **options, stochastic_cast=True, seed=seed)
        if profile.separate_sf:
            yield call(quant.per_token_cast_with_sf_only, x, form.fmt, group, **options)
            if layout == "row_major" and not form.tensor_sf:
                sf = empty(num_tokens, ceil_div(width, group), dtype=_e4m3_or_float32(form))
                flags = {"use_e4m3_sf": form.e4m3_sf}
                yield call(quant.per_token_cast_with_precomputed_sf, x, form.fmt, group, sf, **flags)
        for block in profile.recasts:
            yield call(quant.per_token_cast, _pair("e4m3", num_tokens, width, block), form.fmt, group, block, **options)


def _casts_back(profile: Profile, form: Format, width: int, num_tokens: int) -> Iterator[Call]:
    group = form.num_per_channels or width
    sf_dtype = torch.float8_e4m3fn if form.tensor_sf or form.e4m3_sf else None
    tensor_sf = empty(1) if form.tensor_sf else None
    for layout, fmt in product(form.sf_layouts, profile.outputs):
        pair = _pair(form.fmt, num_tokens, width, (1, group), layout, sf_dtype)
        if form.fmt == "e5m6":
            yield call(quant.cast_back_e5m6, pair, fmt, (1, group))
            continue
        yield call(quant.per_token_cast_back, pair, fmt, group, tensor_sf=tensor_sf)
        if form.fmt == "e2m1":
            yield call(quant.unpack_from_e2m1fn_x2, pair[0], torch.bfloat16 if fmt == "bf16" else torch.float32)


def _conversions(profile: Profile, width: int, num_tokens: int) -> Iterator[Call]:
    """Casts without scale factors in the result."""
    for dtype, to in profile.conversions:
        x, to = empty(num_tokens, width, dtype=dtype), getattr(torch, to)
        yield call(quant.cast, x, to)
        if profile.stochastic and to.itemsize < x.dtype.itemsize:
            yield call(quant.cast, x, to, True, seed=empty(1, dtype=torch.int64))
    for dtype, form in product(profile.inputs, profile.activations if profile.cast_and_back else ()):
        if form.fmt != "e5m6":
            group, x = form.num_per_channels or width, empty(num_tokens, width, dtype=dtype)
            is_e4m3 = form.e4m3_sf or form.tensor_sf
            yield call(quant.per_token_cast_and_cast_back, x, form.fmt, group, form.round_sf, is_e4m3)


def _e4m3_or_float32(form: Format) -> torch.dtype:
    return torch.float8_e4m3fn if form.e4m3_sf else torch.float32


def _weights(profile: Profile, width: int) -> Iterator[Call]:
    num_rows = 256  # rows of a weight; no kernel depends on them
    if profile.training and width % 128 == 0:
        for size in sorted({form.block[0] for form in profile.weights if form.block in ((32, 32), (128, 128))}):
            for count in (1, 8, 64):  # a kernel for up to each of these numbers of weights
                sf = [empty(num_rows // size, width // size)] * count
                yield call(quant.batched_transpose_weight_sf, sf, size, [False] * count, [None] * count)
    for form in profile.weights:
        for dtype, layout in product(profile.inputs, form.sf_layouts):
            x, flags = empty(num_rows, width, dtype=dtype), _flags(layout, form.round_sf)
            yield call(quant.per_block_cast, x, form.fmt, form.block, **flags)
            pair = _pair(form.fmt, num_rows, width, form.block, layout)
            if profile.separate_sf:
                yield call(quant.per_block_cast_with_sf_only, x, form.fmt, form.block, **flags)
                if layout == "row_major":
                    yield call(quant.per_block_cast_with_precomputed_sf, x, form.fmt, form.block, pair[1])
            for fmt in profile.outputs:
                yield call(quant.cast_back, pair, fmt, form.block)
    for block, layout in product(profile.lossless_blocks, ("row_major", "packed_ue8m0")):
        pair = _pair("e2m1", num_rows, width, (1, 32), layout)
        yield call(quant.per_block_cast_lossless, pair, "e4m3", (1, 32), block, **_flags(layout, True))


def _numbers_of_rows(profile: Profile, num_tokens: int) -> tuple[int, int]:
    """Rows for all pairs of a token and an expert: the fewest, and the most, with the rows of each expert padded."""
    num_pairs = num_tokens * profile.num_topk
    return align(num_pairs, 16), align(num_pairs + (_TOKENS - 1) * profile.num_experts, _TOKENS)


def _clamp_values(profile: Profile) -> list[float | None]:
    return [10.0 if clamps else None for clamps in profile.swiglu_clamps]


def _segments(profile: Profile, num_rows: int) -> list[dict[str, Any]]:
    """Arguments of SwiGLU: where experts' rows end, alone, with weights by position, and with these times a factor."""
    if not profile.swiglu_segments:
        return []
    ends = {"psum_num_tokens_per_expert": empty(profile.num_experts, dtype=torch.int32)}
    weighted = {**ends, "topk_weights": empty(num_rows)}
    return [ends, weighted, {**weighted, "routed_scaling_factor": 2.5}]


def _swiglu(profile: Profile, form: Format, hidden: int, num_tokens: int) -> Iterator[Call]:
    group = form.num_per_channels or hidden
    if form.fmt == "e5m6" or form.tensor_sf or form.e4m3_sf or group not in (32, _TOKENS, hidden):
        return
    num_rows = _numbers_of_rows(profile, num_tokens)[0]
    rows, weights = empty(num_rows, dtype=torch.int32), empty(num_tokens, profile.num_topk)
    weighted = {"pos_to_token_topk": rows, "topk_weights": weights}
    maps: list[dict[str, Any]] = [{}]
    if profile.num_experts > 1:
        maps += [weighted, {"pos_to_expert": rows}, {**weighted, "pos_to_expert": rows}]
    maps += _segments(profile, num_rows)
    # The op has other layouts for these groups only.
    layouts = [layout for layout in form.sf_layouts if layout == "row_major" or group in (32, _TOKENS)]
    clamps = _clamp_values(profile)
    for swiglu, dtype, layout, clamp, of_rows in product(profile.swiglus, profile.inputs, layouts, clamps, maps):
        x = empty(num_rows, swiglu.width * hidden, dtype=dtype)
        options = {**_token_options(form, layout), **of_rows, **swiglu.options, "swiglu_clamp_value": clamp}
        num_counts = 4 if "psum_num_tokens_per_expert" in of_rows else 3
        for count in (None, empty(num_counts, dtype=torch.int64)) if clamp and profile.training else (None,):
            yield call(quant.swiglu_forward_and_per_token_cast, x, form.fmt, group, **options, clamped_count=count)


def _weights_of_norms(profile: Profile, dtype: str) -> list[str]:
    """Dtypes of weights: that of x, or float32."""
    return sorted({each if each == dtype else "float32" for each in profile.norm_weights})


def _norms(profile: Profile, width: int, dtype: str, num_tokens: int) -> Iterator[Call]:
    x = empty(num_tokens, width, dtype=dtype)
    options = {"round_before_weight": profile.norm_rounds_before_weight}
    residuals = (None, empty(num_tokens, width, dtype=dtype))
    for weight_dtype, residual in product(_weights_of_norms(profile, dtype), residuals):
        weight = empty(width, dtype=weight_dtype)
        yield call(quant.norm_forward, x, weight, 1e-6, residual, **options)
        if profile.training:
            yield call(quant.norm_forward, x, weight, 1e-6, residual, with_rstd=True, **options)
            for main_grad in (None, empty(width)):
                yield call(quant.norm_backward, x, x, weight, empty(num_tokens), residual, 1.0, main_grad)
        for form in profile.activations if width % 64 == 0 else ():
            group = form.num_per_channels or width
            for layout in form.sf_layouts if form.fmt != "e5m6" else ():
                flags = {**_token_options(form, layout), **options}
                yield call(quant.norm_forward_and_per_token_cast, x, weight, 1e-6, form.fmt, group, residual, **flags)


def _casts_by_channel(profile: Profile, width: int, dtype: str, num_tokens: int) -> Iterator[Call]:
    x = empty(align(num_tokens, _TOKENS), width, dtype=dtype)
    forms = [form for form in profile.activations if form.fmt == "e4m3"]
    for round_sf in sorted({form.round_sf for form in forms}):
        for num_per_tokens in (32, _TOKENS) if any(form.num_per_channels == 32 for form in forms) else (_TOKENS,):
            for packed in (False, True) if round_sf else (False,):
                yield call(quant.per_channel_cast, x, "e4m3", num_per_tokens, round_sf, use_packed_ue8m0=packed)
        if dtype == "bfloat16" and width % 128 == 0 and profile.recasts:
            pair = _pair("e4m3", *x.shape, (1, 128))
            yield call(quant.per_channel_cast, pair, "e4m3", _TOKENS, round_sf, 128)
        if dtype == "bfloat16":
            yield call(quant.per_channel_cast_and_transpose, x, "e4m3", _TOKENS, round_sf)
        yield from _gathers(profile, width, dtype, num_tokens, round_sf)
    for form in forms:
        for layout, transposes in product(form.sf_layouts, (False, True)):
            if layout != "swizzled" and form.num_per_channels in (32, _TOKENS):
                flags = {**_flags(layout, form.round_sf), "transpose_channel_data": transposes}
                yield call(quant.per_token_and_channel_cast, x, "e4m3", form.num_per_channels, _TOKENS, **flags)
    for y in (x, _data("e4m3", *x.shape)):
        yield call(quant.transpose, y)
        yield call(quant.batched_transpose, y.unsqueeze(0))


def _gathers(profile: Profile, width: int, dtype: str, num_tokens: int, round_sf: bool) -> Iterator[Call]:
    """`per_channel_cast_fused` of rows as they are, and of rows that are fetched from their tokens."""
    sizes = align(num_tokens, _TOKENS), num_tokens
    sources: list[tuple[Any, ...]] = [(*(empty(size, width, dtype=dtype) for size in sizes), None)]
    if dtype == "bfloat16" and width % 128 == 0:
        sources.append((*(_pair("e4m3", size, width, (1, 128)) for size in sizes), 128))
    for whole, tokens, num_per_channels in sources:
        options = "e4m3", _TOKENS, round_sf, num_per_channels
        yield call(quant.per_channel_cast_fused, whole, *options)
        for num_rows in _numbers_of_rows(profile, num_tokens):
            yield call(quant.per_channel_cast_fused, tokens, *options, empty(num_rows, dtype=torch.int32))


def _swiglu_training(profile: Profile, hidden: int, num_tokens: int) -> Iterator[Call]:
    """Backward with a cast, and forward with a cast by channels."""
    num_rows, pairs = _numbers_of_rows(profile, num_tokens)[0], (num_tokens, profile.num_topk)
    maps = empty(*pairs), empty(num_rows, dtype=torch.int32), empty(*pairs, dtype=torch.int32)
    formats = sorted({(f.num_per_channels, f.round_sf) for f in profile.activations if f.fmt == "e4m3"})
    for (group, round_sf), clamp in product(formats, _clamp_values(profile)):
        if group not in (32, _TOKENS):
            continue
        grad_out = empty(num_rows, hidden, dtype=torch.bfloat16)
        for swiglu in profile.swiglus:
            x, options = _pair("e4m3", num_rows, swiglu.width * hidden, (1, group)), swiglu.options
            yield call(quant.swiglu_backward_and_per_token_cast, x, grad_out, *maps, group, round_sf, clamp, **options)
            for of_rows, recompute in product(_segments(profile, num_rows), (False, True)):
                options = {**swiglu.options, **of_rows, "clamp_value": clamp, "do_recompute": recompute}
                yield call(
                    quant.swiglu_backward_and_per_token_cast, x, grad_out, None, None, None, group, round_sf, **options
                )
        x, cast = empty(align(num_rows, _TOKENS), 2 * hidden, dtype=torch.bfloat16), ("e4m3", _TOKENS, round_sf)
        for without_transpose in (False, True):
            yield call(quant.swiglu_forward_and_per_channel_cast_and_transpose, x, *cast, without_transpose, clamp)


def _plain_swiglu_training(profile: Profile, hidden: int, num_tokens: int) -> Iterator[Call]:
    """Forward and backward without a cast, of plain rows, and of rows with weights and experts."""
    num_rows, pairs = _numbers_of_rows(profile, num_tokens)[0], (num_tokens, profile.num_topk)
    rows = empty(num_rows, dtype=torch.int32)
    weighted = {"pos_to_token_topk": rows, "topk_weights": empty(*pairs), "pos_to_expert": rows}
    forms = [{}, weighted, *_segments(profile, num_rows)]
    for swiglu, dtype, clamp, maps in product(profile.swiglus, profile.inputs, _clamp_values(profile), forms):
        x, grad_out = (empty(num_rows, columns, dtype=dtype) for columns in (swiglu.width * hidden, hidden))
        options = {"fmt": "bf16" if dtype == "bfloat16" else "fp32", **maps, **swiglu.options}
        yield call(quant.swiglu_forward, x, clamp, **options)
        of_weights = {"token_topk_to_pos": empty(*pairs, dtype=torch.int32)} if maps is weighted else {}
        yield call(quant.swiglu_backward, x, grad_out, clamp, **options, **of_weights)


def _rotations(profile: Profile, rotary: Rotary, dtype: str, num_tokens: int) -> Iterator[Call]:
    """In place; for training also to other tensors, as the forward and the backward of a differentiable one do."""
    cache, head_dim = empty(num_tokens, rotary.rot), rotary.head_dim or rotary.rot
    to_out = (False, True) if profile.training else (False,)
    for at, batched, is_trained in product(rotary.positions, rotary.batched, to_out):
        tokens = (1, num_tokens) if batched else (num_tokens,)
        query, key, out, key_out = (empty(*tokens, heads, head_dim, dtype=dtype) for heads in (8, 1, 8, 1))
        written = {"out": out, "key_out": key_out} if is_trained else {}
        at_angles = (None if at == "none" else empty(*tokens, dtype=getattr(torch, at)), rotary.interleaved)
        if False in rotary.normed:
            yield call(quant.apply_rotary, query, cache, key, *at_angles, **written)
        for weight_dtype in _weights_of_norms(profile, dtype) if True in rotary.normed else ():
            weight, rstd, key_rstd = empty(head_dim, dtype=weight_dtype), empty(*tokens, 8), empty(*tokens, 1)
            of_norm = {"round_before_weight": profile.norm_rounds_before_weight, "with_rstd": is_trained}
            both = (query, cache, weight, weight)
            yield call(quant.qk_norm_rotary, *both, 1e-6, key, *at_angles, **of_norm, **written)
            for main_grad in (None, empty(head_dim)) if is_trained else ():
                grads = dict.fromkeys(("query_weight_grad", "key_weight_grad"), main_grad)
                given = (*both, rstd, key, key, key_rstd)
                yield call(quant.qk_norm_rotary_backward, query, *given, *at_angles, **grads)
