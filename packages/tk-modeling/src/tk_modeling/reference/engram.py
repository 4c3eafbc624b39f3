"""EngramGate and Engram in plain PyTorch, in the dtype of their parameters."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from tk_engram.layout import EngramLayout


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; each stream has its own weights: (m, H)."""
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def _gated(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    image_token_mask: Tensor | None,
) -> Tensor:
    """gate · v, (..., m, H)."""
    products = _rms_norm(hidden_states, weight_hidden, eps) * _rms_norm(k, weight_embed, eps)
    d = products.sum(-1, keepdim=True) * hidden_states.shape[-1] ** -0.5
    gate = torch.sigmoid(d.sign() * d.abs().clamp_min(clamp_value).sqrt())
    gated = gate * v.unsqueeze(-2)
    return gated if image_token_mask is None else gated.masked_fill(image_token_mask[..., None, None], 0)


class EngramGate(nn.Module):
    """`tk_modeling.EngramGate`."""

    def __init__(
        self,
        hidden: int,
        *,
        mhc_mult: int = 4,
        eps: float = 1e-6,
        clamp_value: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.clamp_value = clamp_value
        self.weight_hidden = nn.Parameter(torch.ones(mhc_mult, hidden, device=device, dtype=dtype))
        self.weight_embed = nn.Parameter(torch.ones(mhc_mult, hidden, device=device, dtype=dtype))

    def forward(self, hidden_states: Tensor, k: Tensor, v: Tensor, *, image_token_mask: Tensor | None = None) -> Tensor:
        """hidden_states and k (..., m, H), v (..., H) → (..., m, H)."""
        weights = self.weight_hidden, self.weight_embed
        return hidden_states + _gated(hidden_states, k, v, *weights, self.clamp_value, self.eps, image_token_mask)


class Engram(nn.Module):
    """`tk_modeling.Engram`, without decoding."""

    def __init__(
        self,
        hidden: int,
        layout: "EngramLayout",
        layer: int,
        *,
        head_dim: int,
        mhc_mult: int = 4,
        short_conv: bool = True,
        pad_id: int = 0,
        block_id: int | None = None,
        eps: float = 1e-6,
        clamp_value: float = 1e-6,
        conv_eps: float = 1e-5,
        sparse_grad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.block_id = block_id
        self.eps = eps
        self.clamp_value = clamp_value
        self.conv_eps = conv_eps
        self.sparse_grad = sparse_grad
        multipliers, vocab_sizes, offsets = (constants[layer : layer + 1] for constants in layout.tensors(device))
        self.register_buffer("multipliers", multipliers)
        self.register_buffer("vocab_sizes", vocab_sizes)
        self.register_buffer("offsets", offsets)
        options = {"device": device, "dtype": dtype}
        self.table = nn.Parameter(torch.randn(layout.num_rows[layer], head_dim, **options))
        projection = nn.Linear(offsets.shape[1] * head_dim, (mhc_mult + 1) * hidden, bias=False, **options)
        self.kv_weight = projection.weight
        self.weight_hidden = nn.Parameter(torch.ones(mhc_mult, hidden, **options))
        self.weight_embed = nn.Parameter(torch.ones(mhc_mult, hidden, **options))
        self.norm_weight = nn.Parameter(torch.ones(mhc_mult, hidden, **options)) if short_conv else None
        self.conv_weight = nn.Parameter(torch.zeros(mhc_mult, hidden, 4, **options)) if short_conv else None

    def forward(
        self,
        hidden_states: Tensor,
        token_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        image_token_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states (tokens, m, H) or (batch, sequence, m, H), token_ids and mask likewise → as hidden_states."""
        if token_ids.dim() == 1:
            lengths = [len(token_ids)] if cu_seqlens is None else cu_seqlens.diff().tolist()
            masks = [None] * len(lengths) if image_token_mask is None else image_token_mask.split(lengths)
            sequences = zip(hidden_states.split(lengths), token_ids.split(lengths), masks)
            return torch.cat([self._sequences(x[None], ids[None], mask)[0] for x, ids, mask in sequences])
        return self._sequences(hidden_states, token_ids, image_token_mask)

    def _sequences(self, x: Tensor, token_ids: Tensor, image_token_mask: Tensor | None) -> Tensor:
        """x (batch, sequence, m, H), token_ids (batch, sequence)."""
        rows = F.embedding(self._indices(token_ids), self.table, sparse=self.sparse_grad).flatten(-2)
        if image_token_mask is not None:
            rows = rows.masked_fill(image_token_mask[..., None], 0)
        mhc_mult = x.shape[-2]
        kv = F.linear(rows, self.kv_weight).unflatten(-1, (mhc_mult + 1, -1))
        weights = self.weight_hidden, self.weight_embed
        gated = _gated(
            x, kv[..., :mhc_mult, :], kv[..., mhc_mult, :], *weights, self.clamp_value, self.eps, image_token_mask
        )
        return x + gated if self.conv_weight is None else x + gated + self._conv(gated)

    def _indices(self, token_ids: Tensor) -> Tensor:
        """(batch, sequence) → rows of the table, int64 (batch, sequence, heads)."""
        multipliers, ids = self.multipliers[0], token_ids.long()
        is_open = torch.ones_like(ids, dtype=torch.bool)
        hashes = torch.zeros_like(ids)
        remainders = []
        for k in range(len(multipliers)):
            # False before the start of a sequence.
            before = F.pad(ids, (k, 0))[:, : ids.shape[1]]
            is_open = is_open & F.pad(torch.ones_like(is_open), (k, 0))[:, : ids.shape[1]]
            if self.block_id is not None:
                is_open = is_open & (before != self.block_id)
            hashes = hashes ^ (torch.where(is_open, before, self.pad_id) * multipliers[k])
            if k > 0:
                remainders.append(hashes.unsqueeze(-1) % self.vocab_sizes[0, k - 1].long())
        return torch.cat(remainders, -1) + self.offsets[0]

    def _conv(self, u: Tensor) -> Tensor:
        """SiLU of the causal convolution of u (batch, sequence, m, H), normalized."""
        if u.shape[1] == 0:  # conv1d rejects it
            return u
        dilation = len(self.multipliers[0])
        n = _rms_norm(u, self.norm_weight, self.conv_eps).flatten(-2).transpose(1, 2)
        n = F.pad(n, (3 * dilation, 0))
        weight = self.conv_weight.flatten(0, 1).unsqueeze(1)
        y = F.conv1d(n, weight, dilation=dilation, groups=len(weight))
        return F.silu(y).transpose(1, 2).unflatten(-1, u.shape[-2:])
