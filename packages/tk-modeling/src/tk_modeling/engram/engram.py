"""Engram: the memory that a layer looks up by the n-grams of its input, from token ids to the residual streams."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import tk_engram
from tk_core import check
from tk_engram.layout import EngramLayout
from tk_modeling.engram.engram_gate import check_sizes
from tk_modeling.engram.functional import batch_offsets, engram_gate_kv, engram_lookup, short_conv
from tk_modeling.gradients import autocast_to_bf16, needs_gradients
from tk_modeling.linear import linear
from tk_modeling.options import check_flags, check_numbers, check_placement


class EngramState(NamedTuple):
    """An `Engram`'s memory of B sequences that are decoded; each forward updates it in place."""

    history: Tensor
    """The last N - 1 ids of each sequence, newest first, negative or pad_id where there is none: int32 (B, N - 1)."""
    conv: Tensor | None
    """The last inputs of the convolution, oldest first, bfloat16 (B, 3 · N, m, H); None without a convolution."""


class Engram(nn.Module):
    """x + gate · v + SiLU(conv(norm(gate · v))): k and v are projections of the rows that a token's n-grams look up.

    Each n-gram of 2 to N ids that ends at a token is hashed to a row of each of its M tables; these lie one after the
    other in `table`. The gate is that of `EngramGate`, the convolution that of `short_conv` with dilation N. Source:
    Engram, arXiv 2601.07372.

    Args:
        hidden: H, channels of a stream: a multiple of 64, up to 16384.
        layout: the tables of the model, from `tk_engram.layout.engram_layout`.
        layer: which of the layout's layers this is, an index of `layout.layer_ids`.
        head_dim: channels of a table's row, a multiple of 32.
        mhc_mult: m, the residual streams, 1 to 8.
        short_conv: whether there is a convolution; x + gate · v without.
        pad_id: the id that stands for tokens before a sequence.
        block_id: an id that no n-gram reaches over, such as that of images; None for none.
        eps: of the gate's norms.
        clamp_value: of the gate, see `EngramGate`.
        conv_eps: of the convolution's norm.
        sparse_grad: whether the table's gradient is sparse, as `tk_modeling.engram_lookup` describes it.
        device: of parameters and buffers.
        dtype: of the parameters, bfloat16 or float32; None for torch's default. Float32 ones need bfloat16 autocast.

    Parameters:
        table: (R, head_dim), all tables of the layer; initial values of nn.Embedding.
        kv_weight: ((m + 1) · H, (N - 1) · M · head_dim), the projection to m keys and a value; initial values of
            nn.Linear.
        weight_hidden, weight_embed: (m, H), of the norms of x and k; ones.
        norm_weight: (m, H), of the convolution's norm; ones.
        conv_weight: (m, H, 4); zeros, so that at first the convolution adds nothing.

    The hash's constants `multipliers`, `vocab_sizes` and `offsets` are buffers, and saved with the table that was
    trained with them; reset_parameters sets those of the layout.

    A frozen table may lie in pinned host memory, where it is read in place, or be float8_e4m3fn with its scales in the
    buffer `table_sf`. Set either by hand after the module has been moved, since `to()` moves and casts it:

        engram.table = nn.Parameter(engram.table.detach().cpu().pin_memory(), requires_grad=False)
    """

    def __init__(
        self,
        hidden: int,
        layout: EngramLayout,
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
        check_sizes(hidden, mhc_mult)
        check.require_type(isinstance(layout, EngramLayout), "layout", "an EngramLayout", layout)
        check.in_range("layer", layer, 0, len(layout.layer_ids) - 1)
        check.in_range("head_dim", head_dim, 32, 2**31 - 1)
        check.multiple_of("head_dim", head_dim, 32)
        check.in_range("pad_id", pad_id, -(2**31), 2**31 - 1)
        if block_id is not None:
            check.in_range("block_id", block_id, -(2**31), 2**31 - 1)
        check_numbers(eps=eps, clamp_value=clamp_value, conv_eps=conv_eps)
        check.require(conv_eps > 0, "conv_eps", "more than 0", conv_eps)
        check_flags(short_conv=short_conv, sparse_grad=sparse_grad)
        check_placement(device, dtype)
        self.hidden = hidden
        self.head_dim = head_dim
        self.mhc_mult = mhc_mult
        self.pad_id = pad_id
        self.block_id = block_id
        self.eps = eps
        self.clamp_value = clamp_value
        self.conv_eps = conv_eps
        self.sparse_grad = sparse_grad
        self._layout, self._layer = layout, layer
        for name, constants in self._hash_constants(device).items():
            self.register_buffer(name, constants)
        self.register_buffer("table_sf", None)
        num_heads = self.offsets.shape[1]
        options = {"device": device, "dtype": dtype}
        self.table = nn.Parameter(torch.empty(layout.num_rows[layer], head_dim, **options))
        self.kv_weight = nn.Parameter(torch.empty((mhc_mult + 1) * hidden, num_heads * head_dim, **options))
        self.weight_hidden = nn.Parameter(torch.empty(mhc_mult, hidden, **options))
        self.weight_embed = nn.Parameter(torch.empty(mhc_mult, hidden, **options))
        self.norm_weight = nn.Parameter(torch.empty(mhc_mult, hidden, **options)) if short_conv else None
        self.conv_weight = nn.Parameter(torch.empty(mhc_mult, hidden, 4, **options)) if short_conv else None
        self.reset_parameters()

    @property
    def max_ngram(self) -> int:
        """N, the ids of the longest n-gram."""
        return self.multipliers.shape[1]

    def _hash_constants(self, device: torch.device | str | None) -> dict[str, Tensor]:
        constants = (whole[self._layer : self._layer + 1] for whole in self._layout.tensors(device))
        return dict(zip(("multipliers", "vocab_sizes", "offsets"), constants, strict=True))

    def reset_parameters(self) -> None:
        """Draw the table and the projection; set the hash's constants, norms' weights to ones, convolution to zeros."""
        for name, constants in self._hash_constants(self.offsets.device).items():
            getattr(self, name).copy_(constants)
        nn.init.normal_(self.table)
        bound = self.kv_weight.shape[1] ** -0.5
        nn.init.uniform_(self.kv_weight, -bound, bound)
        nn.init.ones_(self.weight_hidden)
        nn.init.ones_(self.weight_embed)
        if self.conv_weight is not None:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.conv_weight)

    def new_state(self, batch_size: int) -> EngramState:
        """The state of `batch_size` sequences that have no token yet, for `forward`."""
        check.in_range("batch_size", batch_size, 1, 2**31 - 1)
        history = self.multipliers.new_full((batch_size, self.max_ngram - 1), -1, dtype=torch.int32)
        if self.conv_weight is None:
            return EngramState(history, None)
        shape = (batch_size, 3 * self.max_ngram, self.mhc_mult, self.hidden)
        return EngramState(history, self.conv_weight.new_zeros(shape, dtype=torch.bfloat16))

    def forward(
        self,
        hidden_states: Tensor,
        token_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        image_token_mask: Tensor | None = None,
        state: EngramState | None = None,
    ) -> Tensor:
        """Add to the streams what their tokens' n-grams look up.

        Args:
            hidden_states: the streams, bfloat16 (tokens, m, H) or (batch, sequence, m, H); under bfloat16 autocast
                float32, too.
            token_ids: int32 or int64 (tokens) or (batch, sequence), where each row of the batch is a sequence. An id
                that does not fit int32 counts as the int32 nearest to it, which no vocabulary has (`TK_DEBUG=1` raises
                ValueError).
            cu_seqlens: where each sequence of (tokens) begins, and their number: int32 (B + 1). None: one sequence.
            image_token_mask: bool, shaped as token_ids: tokens that look nothing up; the convolution reaches them.
            state: for decoding, without gradients: from `new_state`, of as many sequences as there are. The tokens
                continue these sequences, and the state is updated in place.

        Returns:
            bfloat16, in the shape of hidden_states.

        Raises:
            TypeError: an argument is not a tensor of its dtype.
            ValueError: a shape or device does not fit, cu_seqlens comes with a batch, or state with gradients.
        """
        (hidden_states,) = autocast_to_bf16(hidden_states)
        shape = check.tensor("token_ids", token_ids, (torch.int32, torch.int64), (..., "tokens"), layout="any")
        check.require(len(shape) <= 2, "token_ids", "shape (tokens) or (batch, sequence)", tuple(shape))
        streams, bfloat16 = (*shape, self.mhc_mult, self.hidden), (torch.bfloat16,)
        check.tensor("hidden_states", hidden_states, bfloat16, streams, layout="any", device=token_ids.device)
        if image_token_mask is not None:
            check.tensor("image_token_mask", image_token_mask, (torch.bool,), tuple(shape), layout="any")
            image_token_mask = image_token_mask.reshape(-1).contiguous()
        if len(shape) == 2:
            check.require(cu_seqlens is None, "cu_seqlens", "None for a batch", type(cu_seqlens).__name__)
            cu_seqlens = batch_offsets(*shape, token_ids.device)
        if state is not None:
            needed = needs_gradients(hidden_states, *self.parameters())
            check.require(not needed, "state", "None where gradients are needed", type(state).__name__)
        x = hidden_states.reshape(-1, *streams[-2:]).contiguous()
        ids = token_ids.reshape(-1).contiguous()
        if ids.dtype is torch.int64:
            ids = _narrowed(ids)
        return self._forward(x, ids, cu_seqlens, image_token_mask, state).view(streams)

    def _forward(
        self,
        x: Tensor,
        token_ids: Tensor,
        cu_seqlens: Tensor | None,
        image_token_mask: Tensor | None,
        state: EngramState | None,
    ) -> Tensor:
        history = None if state is None else state.history
        windows = tk_engram.ngram_windows(
            token_ids, cu_seqlens, self.max_ngram, self.pad_id, block_id=self.block_id, history=history
        )
        constants = self.multipliers, self.vocab_sizes, self.offsets
        indices = tk_engram.engram_hash(windows, *constants, image_token_mask=image_token_mask)[0]
        rows = engram_lookup(indices, self.table, table_sf=self.table_sf, sparse_grad=self.sparse_grad)
        kv = linear(rows.flatten(1), self.kv_weight).view(-1, self.mhc_mult + 1, self.hidden)
        out = engram_gate_kv(
            x,
            kv,
            self.weight_hidden,
            self.weight_embed,
            self.clamp_value,
            self.eps,
            image_token_mask=image_token_mask,
            add_residual=self.conv_weight is None,
        )
        if self.conv_weight is not None:
            out = short_conv(
                out,
                self.norm_weight,
                self.conv_weight,
                dilation=self.max_ngram,
                cu_seqlens=cu_seqlens,
                eps=self.conv_eps,
                residual=x,
                state=None if state is None else state.conv,
            )
        if history is not None:
            _advance(history, windows, cu_seqlens)
        return out

    def extra_repr(self) -> str:
        """Sizes and the constructor's options."""
        return (
            f"{self.hidden}, num_rows={self.table.shape[0]}, num_heads={self.offsets.shape[1]}, "
            f"head_dim={self.head_dim}, max_ngram={self.max_ngram}, mhc_mult={self.mhc_mult}, "
            f"short_conv={self.conv_weight is not None}, pad_id={self.pad_id}, block_id={self.block_id}, "
            f"eps={self.eps}, clamp_value={self.clamp_value}, conv_eps={self.conv_eps}, sparse_grad={self.sparse_grad}"
        )


def _narrowed(token_ids: Tensor) -> Tensor:
    """The ids as int32. One that does not fit becomes the nearest int32, which is no id of another token."""
    narrowed = token_ids.clamp(-(2**31), 2**31 - 1)
    if check.reads_data(token_ids) and not torch.equal(narrowed, token_ids):
        wide = int(token_ids[narrowed != token_ids][0])
        raise ValueError(f"token_ids: expected ids of 32 bits, got {wide}")
    return narrowed.to(torch.int32)


def _advance(history: Tensor, windows: Tensor, cu_seqlens: Tensor | None) -> None:
    """Set history (B, N - 1) to the window of each sequence's last token, without the window's oldest id.

    A window that ends early has pad_id from there on, and so will the next ones: pad_id serves like a negative id.
    """
    if len(windows) == 0:
        return
    newest = windows[:, :-1]
    if cu_seqlens is None:
        history.copy_(newest[-1:])
        return
    last = newest[(cu_seqlens[1:] - 1).clamp(min=0)]
    history.copy_(torch.where(cu_seqlens.diff().unsqueeze(1) > 0, last, history))
