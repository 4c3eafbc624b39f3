"""Gate, lookup and short convolution of Engram, differentiable."""

import math

import torch
from torch import Tensor

import tk_engram
from tk_core import check
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import autocast_to_bf16, needs_gradients

_BF16 = (torch.bfloat16,)
_TABLE_DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def engram_gate(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    *,
    image_token_mask: Tensor | None = None,
    add_residual: bool = True,
) -> Tensor:
    """Add v to each stream of its token, times a gate: x + sigmoid(sign(d) · √max(|d|, clamp_value)) · v.

    d = Σ x' · k' / √H over a stream's H channels, with x' = x · rsqrt(mean(x²) + eps) · weight_hidden, k' likewise with
    weight_embed; d = 0 gives a gate of ½. In float32, rounded once. The root passes no gradient where
    |d| < clamp_value. Differentiable by the first five arguments; gradients of weights are computed in float32.

    Args:
        hidden_states: x, the streams, bfloat16 (..., m, H); m is 1 to 8, H a multiple of 64, up to 16384.
        k: bfloat16 (..., m, H), such as kv[..., :m, :] of one projection kv (..., m + 1, H).
        v: bfloat16 (..., H), such as kv[..., m, :].
        weight_hidden: bfloat16 or float32 (m, H), contiguous. Where it has a float32 `main_grad`, its gradient is added
            there and `.grad` stays None.
        weight_embed: likewise, with a main_grad of its own or none.
        clamp_value: at least 0.
        eps: at least 0.
        image_token_mask: bool (...): tokens that keep their streams, whose k and v have no gradient; None for none.
        add_residual: False for gate · v alone (0 for masked tokens).

    Streams, k and v may have any strides; what the kernels cannot read in place is copied. Under bfloat16 autocast they
    may be float32.

    Returns:
        bfloat16 (..., m, H).

    Raises:
        TypeError: an argument is not of its type, or no tensor of its dtype.
        ValueError: a shape, stride, device or number does not fit.
    """
    hidden_states, k, v = autocast_to_bf16(hidden_states, k, v)
    shape = check.tensor("hidden_states", hidden_states, _BF16, (..., "m", "H"), layout="any")
    leading, device = tuple(shape[:-2]), hidden_states.device
    check.tensor("k", k, _BF16, tuple(shape), layout="any", device=device)
    check.tensor("v", v, _BF16, (*leading, shape[-1]), layout="any", device=device)
    k, v = _with_rows(k.reshape(-1, *shape[-2:])), _with_rows(v.reshape(-1, shape[-1]))
    weights = weight_hidden, weight_embed
    return _gate(hidden_states, k, v, weights, clamp_value, eps, image_token_mask, add_residual)


def engram_gate_kv(
    hidden_states: Tensor,
    kv: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    *,
    image_token_mask: Tensor | None = None,
    add_residual: bool = True,
) -> Tensor:
    """`engram_gate` of k = kv[..., :m, :] and v = kv[..., m, :]; kv (..., m + 1, H) gets one dense gradient."""
    hidden_states, kv = autocast_to_bf16(hidden_states, kv)
    *leading, mhc_mult, hidden = check.tensor("hidden_states", hidden_states, _BF16, (..., "m", "H"), layout="any")
    shape = (*leading, mhc_mult + 1, hidden)
    check.tensor("kv", kv, _BF16, shape, layout="any", device=hidden_states.device)
    kv = _with_rows(kv.reshape(-1, *shape[-2:]))
    weights = weight_hidden, weight_embed
    return _gate(hidden_states, kv, None, weights, clamp_value, eps, image_token_mask, add_residual)


def _with_rows(x: Tensor) -> Tensor:
    """x, copied unless its last dimension has stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gate(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor | None,
    weights: tuple[Tensor, Tensor],
    clamp_value: float,
    eps: float,
    image_token_mask: Tensor | None,
    add_residual: bool,
) -> Tensor:
    shape = hidden_states.shape
    x = hidden_states.reshape(-1, *shape[-2:]).contiguous()
    if image_token_mask is not None:
        check.tensor("image_token_mask", image_token_mask, (torch.bool,), tuple(shape[:-2]), layout="any")
        image_token_mask = image_token_mask.reshape(-1).contiguous()
    saves = needs_gradients(x, k, v, *weights)
    out, *_ = _EngramGate.call(x, k, v, *weights, clamp_value, eps, image_token_mask, add_residual, saves)
    return out.view(shape)


def _k_and_v(k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
    """k and v; where v is None, k (T, m + 1, H) holds both."""
    return (k[:, :-1], k[:, -1]) if v is None else (k, v)


class _EngramGate(Function):
    parameters = ("weight_hidden", "weight_embed")
    outputs = ("out", "dot", "gate_score", "rstd_x", "rstd_k", "weight_fused")
    saves = (
        *("x", "k", "v", "weight_hidden", "weight_embed", "image_token_mask", "add_residual"),
        *("weight_fused", "dot", "gate_score", "rstd_x", "rstd_k", "clamp_value"),
    )

    @staticmethod
    def forward(
        x: Tensor,
        k: Tensor,
        v: Tensor | None,
        weight_hidden: Tensor,
        weight_embed: Tensor,
        clamp_value: float,
        eps: float,
        image_token_mask: Tensor | None,
        add_residual: bool,
        save_for_backward: bool,
    ) -> tuple[Tensor | None, ...]:
        weight_fused = tk_engram.fused_weight(weight_hidden, weight_embed)
        options = {"image_token_mask": image_token_mask, "add_residual": add_residual}
        out = tk_engram.engram_gate_fwd(
            x, *_k_and_v(k, v), weight_fused, eps, clamp_value, save_for_backward, **options
        )
        return *out, weight_fused

    @staticmethod
    def backward(ctx: Context, d_out: Tensor) -> Gradients:
        x, k, v, weight_hidden, weight_embed, image_token_mask, add_residual, *gate = ctx.saved
        d_kv = torch.empty_like(k, memory_format=torch.contiguous_format) if v is None else None
        # The op computes all gradients, whatever is frozen.
        d_x, d_k, d_v, d_weight_parts = tk_engram.engram_gate_bwd(
            *(d_out, x, *_k_and_v(k, v), *gate),
            image_token_mask=image_token_mask,
            add_residual=add_residual,
            grad_kv=d_kv,
        )
        d_inputs = d_x, *((d_k, d_v) if d_kv is None else (d_kv, None))
        if not ctx.main_grads:
            return d_inputs
        d_weights = []
        for name, weight in (("weight_hidden", weight_hidden), ("weight_embed", weight_embed)):
            main_grad = ctx.main_grads.get(name)
            adds = _is_contiguous(main_grad)
            d_weights.append(main_grad if adds else torch.zeros_like(weight, dtype=torch.float32))
        tk_engram.grad_w_reduce(d_weight_parts, weight_hidden, weight_embed, *d_weights)
        return *d_inputs, *d_weights


def _is_contiguous(main_grad: Tensor | None) -> bool:
    """Whether there is a main_grad that an op can add to in place."""
    return main_grad is not None and main_grad.is_contiguous()


def engram_lookup(
    indices: Tensor, table: Tensor, *, table_sf: Tensor | None = None, sparse_grad: bool = False
) -> Tensor:
    """Look up rows of a table: out[..., c, :] = table[indices[..., c]], zeros where the index is negative.

    Differentiable by a table on the device of the indices; the gradients of each row are added up in float32. Codes of
    an e4m3 table are multiplied by the scale of their row and group of 32 channels.

    Args:
        indices: int32 (..., C), as `tk_engram.engram_hash` gives them. An index of R or more counts as negative.
        table: bfloat16 (R, D), D a multiple of 32; rows may be strided. Under bfloat16 autocast it may be float32; only
            the rows that are looked up are rounded. Where it has a float32 `main_grad`, the gradient is added there and
            `.grad` stays None. Without requires_grad it may also be float8_e4m3fn, or lie in pinned host memory, where
            it is read in place.
        table_sf: scales of an e4m3 table, (R, D / 32): float32, or uint8 exponents b of 2^(b - 127). None for others.
        sparse_grad: give the gradient as a sparse COO tensor, of the table's dtype, of as many rows as there are
            indices, not coalesced: memory and time do not grow with R, and nothing waits for the device. It names only
            rows that were looked up (row 0, of zeros, if there is none). Not under torch.compile, which knows no sparse
            gradients. With main_grad it changes nothing.

    Returns:
        bfloat16 (..., C, D).

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, or a table that must be frozen requires gradients.
    """
    shape = check.tensor("indices", indices, (torch.int32,), (..., "C"), layout="any")
    check.tensor("table", table, _TABLE_DTYPES, ("R", "D"), layout="rows")
    check.flag("sparse_grad", sparse_grad)
    flat = indices.reshape(math.prod(shape[:-1]), shape[-1]).contiguous()
    if needs_gradients(table):
        frozen, found = "requires_grad=False", "requires_grad=True"
        check.require(table.dtype != torch.float8_e4m3fn, "table", f"{frozen} for float8_e4m3fn", found)
        check.require(table.device == indices.device, "table", f"{frozen} off the device of the indices", found)
        check.require(table_sf is None, "table_sf", "None for a table without scales", type(table_sf).__name__)
        rows = _EngramLookup.call(table, flat, table.shape[0], sparse_grad)
    else:
        rows = _lookup(flat, table, table_sf)
    return rows.view(*shape, table.shape[1])


def _lookup(indices: Tensor, table: Tensor, table_sf: Tensor | None) -> Tensor:
    if table_sf is not None or table.device != indices.device or not _is_autocast(table):
        return tk_engram.engram_lookup(indices, table, table_sf=table_sf)
    num_rows, dim = table.shape
    check.require(num_rows >= 1, "table", "at least one row", num_rows)
    check.require(dim >= 32, "D (columns of table)", "at least 32", dim)
    check.multiple_of("D (columns of table)", dim, 32)
    is_row = (indices >= 0) & (indices < num_rows)
    # A bfloat16 copy of the table could be gigabytes.
    rows = table[torch.where(is_row, indices, 0)].to(torch.bfloat16)
    return rows.masked_fill(~is_row.unsqueeze(-1), 0)


def _is_autocast(table: Tensor) -> bool:
    return table.dtype == torch.float32 and autocast_to_bf16(table[:0])[0].dtype == torch.bfloat16


class _EngramLookup(Function):
    parameters = ("table",)
    saves = ("indices", "num_rows", "sparse_grad")

    @staticmethod
    def forward(table: Tensor, indices: Tensor, num_rows: int, sparse_grad: bool) -> Tensor:
        return _lookup(indices, table, None)

    @staticmethod
    def backward(ctx: Context, d_rows: Tensor) -> Tensor:
        indices, num_rows, sparse_grad = ctx.saved
        main_grad = ctx.main_grads["table"]
        if sparse_grad and main_grad is None:
            return _sparse_gradient(d_rows, indices, num_rows)
        if not _is_contiguous(main_grad):
            return tk_engram.engram_lookup_bwd(d_rows, indices, num_rows)
        tk_engram.engram_lookup_bwd(d_rows, indices, num_rows, grad=main_grad)
        return main_grad


def _sparse_gradient(d_rows: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    rows, values, _ = tk_engram.engram_lookup_bwd(d_rows, indices, num_rows, sparse=True)
    if rows.numel():
        # After the last row the op writes -1, with zeros: these entries may name the last row again.
        rows = torch.where(rows < 0, rows.amax().clamp(min=0), rows)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (num_rows, d_rows.shape[-1]), check_invariants=False)


def short_conv(
    u: Tensor,
    norm_weight: Tensor,
    conv_weight: Tensor,
    *,
    dilation: int,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """Causal convolution of width 4 over normalized tokens, and SiLU: SiLU(Σ_j w[j] · n[t - (3 - j) · dilation]).

    n = u · rsqrt(mean_H(u²) + eps) · norm_weight, zeros before a sequence. With `residual`, u and residual are added.
    In float32, rounded once. Differentiable by u, both weights and residual; gradients of weights are computed in
    float32.

    Args:
        u: bfloat16 (tokens, m, H), or (batch, sequence, m, H), where each row of the batch is a sequence; m is 1 to 8,
            H a multiple of 64, up to 16384. Under bfloat16 autocast float32, too.
        norm_weight: bfloat16 or float32 (m, H), contiguous. Where it has a float32 `main_grad`, its gradient is added
            there and `.grad` stays None.
        conv_weight: likewise (m, H, 4); the last tap is the token's own.
        dilation: tokens between taps, 1 to 65536.
        cu_seqlens: int32 (B + 1), contiguous: sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1, where u is
            (tokens, m, H). None: one sequence.
        eps: positive.
        residual: as u, or None.
        state: for decoding, without gradients: bfloat16 (B, 3 · dilation, m, H), the u before each sequence, the oldest
            first; updated in place.

    Returns:
        bfloat16, in the shape of u.

    Raises:
        TypeError: an argument is not a tensor of its dtype, or no number.
        ValueError: a shape, stride or device does not fit, a number is out of range, cu_seqlens comes with a batch, or
            state with gradients.
    """
    (u,) = autocast_to_bf16(u)
    check.require_type(isinstance(u, Tensor), "u", "a torch.Tensor", u)
    check.require(u.dim() in (3, 4), "u", "shape (tokens, m, H) or (batch, sequence, m, H)", tuple(u.shape))
    shape = check.tensor("u", u, _BF16, (..., "m", "H"), layout="any")
    if residual is not None:
        (residual,) = autocast_to_bf16(residual)
        check.tensor("residual", residual, _BF16, tuple(shape), layout="any", device=u.device)
        residual = residual.reshape(-1, *shape[-2:]).contiguous()
    if u.dim() == 4:
        check.require(cu_seqlens is None, "cu_seqlens", "None where u has a batch", type(cu_seqlens).__name__)
        cu_seqlens = batch_offsets(*shape[:2], u.device)
    u = u.reshape(-1, *shape[-2:]).contiguous()
    if not needs_gradients(u, norm_weight, conv_weight, residual):
        options = {"dilation": dilation, "cu_seqlens": cu_seqlens, "eps": eps}
        out = tk_engram.short_conv(u, norm_weight, conv_weight, **options, residual=residual, state=state)
        return out.view(shape)
    check.require(state is None, "state", "None where gradients are needed", type(state).__name__)
    weights, has_residual = (norm_weight, conv_weight), residual is not None
    return _ShortConv.call(u, *weights, residual, cu_seqlens, dilation, eps, has_residual).view(shape)


def batch_offsets(batch: int, length: int, device: torch.device) -> Tensor | None:
    """cu_seqlens, int32, of a batch whose rows are sequences of one length; None for at most one row."""
    if batch <= 1:
        return None
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


class _ShortConv(Function):
    parameters = ("norm_weight", "conv_weight")
    saves = ("u", "norm_weight", "conv_weight", "cu_seqlens", "dilation", "eps", "has_residual")

    @staticmethod
    def forward(
        u: Tensor,
        norm_weight: Tensor,
        conv_weight: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor | None,
        dilation: int,
        eps: float,
        has_residual: bool,
    ) -> Tensor:
        options = {"dilation": dilation, "cu_seqlens": cu_seqlens, "eps": eps}
        return tk_engram.short_conv(u, norm_weight, conv_weight, **options, residual=residual)

    @staticmethod
    def backward(ctx: Context, d_out: Tensor) -> Gradients:
        u, norm_weight, conv_weight, cu_seqlens, dilation, eps, has_residual = ctx.saved
        options = {"dilation": dilation, "cu_seqlens": cu_seqlens, "eps": eps, "has_residual": has_residual}
        # The op computes all three gradients, whatever is frozen.
        return *tk_engram.short_conv_bwd(d_out, u, norm_weight, conv_weight, **options), d_out if has_residual else None
