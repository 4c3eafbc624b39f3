"""checkpoint_streams: a stack of HyperConnections that keeps few of its residuals for the backward.

A residual has m times the channels of a sublayer's output, and each layer's backward needs the residual that the layer
was given. It can be computed again from an earlier one, by outputs and mixes that are kept anyway. So the layers run in
groups. A group keeps its first residual; instead of a later one, or of a sublayer's input, autograd saves a note of
which tensor it is (torch.autograd.graph.saved_tensors_hooks). When the backward unpacks the first note of a group, one
launch of tk_mhc.mhc_multilayer_recompute computes all of the group's tensors again, with the bits that they had.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tk_mhc
from tk_core import check
from tk_modeling.gradients import autocast_to_bf16
from tk_modeling.mhc.hyper_connection import HyperConnection, split_output
from tk_modeling.mhc.ops import mhc_post


@torch.compiler.disable(reason="checkpoint_streams decides in eager mode what is saved; compile the sublayers")
def checkpoint_streams(
    layers: Sequence[HyperConnection], residual: Tensor, *, pre_mix: Tensor | None = None, group_size: int | None = None
) -> tuple[Any, ...]:
    """Run the layers one after the other, and keep one residual for each group of layers for the backward.

    Outputs and gradients have the bits of layers that are simply called. Each group's first residual, each sublayer's
    output, the mixes, and the tensors that sublayers save, except their inputs, are kept; sublayers may themselves be
    checkpointed (torch.utils.checkpoint). A sublayer takes its input alone. Hooks of the HyperConnections are not
    called, those of their sublayers are. torch.compile breaks its graph here (an error with fullgraph), since it
    chooses by itself which tensors to compute again; sublayers may be compiled.

    Args:
        layers: at least one; of the same hidden size and mhc_mult, all shifted or none.
        residual: bfloat16 (..., m, H), contiguous.
        pre_mix: with shifted layers, the first one's pre_mix, or None.
        group_size: layers in a group. None: about √(m·L / (m+2)) of L layers, with which peak memory is nearly minimal:
            L / group_size residuals, and m+1 hidden states for each layer of the group that is computed again.

    Returns:
        (residual, rests), with shifted layers (residual, next_pre_mix, rests). `rests` has a tuple for each layer: the
        sublayer's results after its output.

    Raises:
        TypeError: a layer is no HyperConnection, or a tensor or number has another type or dtype.
        ValueError: there is no layer, layers do not go together, or a shape, stride or device does not fit.
    """
    shifted = _check_layers(layers, pre_mix)
    if group_size is None:
        mhc_mult = layers[0].mhc_mult
        group_size = max(1, round(math.sqrt(mhc_mult * len(layers) / (mhc_mult + 2))))
    check.integer("group_size", group_size)
    check.require(group_size >= 1, "group_size", "at least 1", group_size)
    (residual,) = autocast_to_bf16(residual)
    rests = []
    for first in range(0, len(layers), group_size):
        group = _Group(residual)
        for layer in layers[first : first + group_size]:
            residual, pre_mix, rest = _run(layer, residual, pre_mix, group)
            rests.append(rest)
    return (residual, pre_mix, rests) if shifted else (residual, rests)


def _check_layers(layers: Sequence[HyperConnection], pre_mix: Tensor | None) -> bool:
    """Check the arguments, and return whether the layers are shifted."""
    check.require(len(layers) >= 1, "layers", "at least one", len(layers))
    for i, layer in enumerate(layers):
        check.require_type(isinstance(layer, HyperConnection), f"layers[{i}]", "a HyperConnection", type(layer))
        found = (layer.hidden, layer.mhc_mult, layer.settings.shifted)
        wanted = (layers[0].hidden, layers[0].mhc_mult, layers[0].settings.shifted)
        check.require(found == wanted, f"layers[{i}]", "(hidden, mhc_mult, shifted) {} as layers[0]", found, wanted)
    shifted = layers[0].settings.shifted
    check.require(shifted or pre_mix is None, "pre_mix", "None where layers are not shifted", "a tensor")
    return shifted


class _Group:
    """A group of layers, with what it takes to compute its residuals and sublayer inputs again."""

    def __init__(self, first_residual: Tensor) -> None:
        self.first_residual = first_residual.detach()
        self.outputs: list[Tensor] = []
        self._pre_mixes: list[Tensor] = []
        self._post_mixes: list[Tensor] = []
        self._comb_mixes: list[Tensor | None] = []
        self._versions: list[int] = []
        self._recomputed: tuple[list[Tensor], list[Tensor]] | None = None

    def add(self, pre_mix: Tensor, y: Tensor, post_mix: Tensor, comb_mix: Tensor | None) -> None:
        """Keep the mixes and the output of one more layer."""
        if not self.outputs:
            self._versions.append(self.first_residual._version)
        self._pre_mixes.append(pre_mix.detach())
        self.outputs.append(y.detach())
        self._post_mixes.append(post_mix.detach())
        self._comb_mixes.append(None if comb_mix is None else comb_mix.detach())
        self._versions.append(y._version)

    def residual(self, layer: int) -> Tensor:
        """The residual that was given to the layer of this number in the group."""
        return self.first_residual if layer == 0 else self._recompute()[0][layer - 1]

    def layer_input(self, layer: int) -> Tensor:
        """The input of that layer's sublayer."""
        return self._recompute()[1][layer]

    @torch.no_grad()
    def _recompute(self) -> tuple[list[Tensor], list[Tensor]]:
        if self._recomputed is None:
            _check_unchanged([self.first_residual, *self.outputs], self._versions)
            # The residual after the last layer is kept: it is the next group's first one, or the result.
            last = len(self.outputs) - 1
            residuals = [torch.empty_like(self.first_residual) for _ in range(last)]
            inputs = [torch.empty_like(y) for y in self.outputs]
            combs = self._comb_mixes[:last]
            if any(comb is None for comb in combs):
                # mhc_post without comb has the bits of the identity.
                *leading, mhc_mult, _ = self.first_residual.shape
                identity = torch.eye(mhc_mult, device=self.first_residual.device)
                identity = identity.expand(*leading, mhc_mult, mhc_mult).contiguous()
                combs = [identity if comb is None else comb for comb in combs]
            tk_mhc.mhc_multilayer_recompute(
                self.first_residual,
                self._pre_mixes,
                self.outputs[:last],
                self._post_mixes[:last],
                combs,
                inputs,
                residuals,
            )
            self._recomputed = residuals, inputs
        return self._recomputed


def _run(
    layer: HyperConnection, residual: Tensor, pre_mix: Tensor | None, group: _Group
) -> tuple[Tensor, Tensor | None, tuple[Any, ...]]:
    """Run one layer: the new residual, next_pre_mix if it is shifted, and the sublayer's results after its output."""
    number = len(group.outputs)
    with _Notes().saved_instead() as notes:
        if number > 0:
            notes.know(residual, partial(group.residual, number))
        collapsed = layer.collapse(residual, pre_mix)
        # No mix for stream 0 alone, nor where the mixes take no gradient: then the layer's input is kept.
        mix = pre_mix if layer.settings.shifted else collapsed.pre_mix
        if mix is not None:
            notes.know(collapsed.layer_input, partial(group.layer_input, number))
        y, rest = split_output(layer.sublayer(collapsed.layer_input), collapsed.layer_input)
        new_residual = mhc_post(y, collapsed.residual, collapsed.post_mix, collapsed.comb_mix)
    if torch.is_grad_enabled():
        mix = torch.zeros_like(collapsed.post_mix) if mix is None else mix
        group.add(mix, y, collapsed.post_mix, collapsed.comb_mix)
    return new_residual, collapsed.pre_mix if layer.settings.shifted else None, rest


class _Note(NamedTuple):
    """Saved instead of a tensor that a group can compute again, or of a view of it."""

    restore: Callable[[], Tensor]
    size: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A tensor that is saved itself, and its version: with hooks, autograd does not look for changes in place."""

    tensor: Tensor
    version: int


class _Notes:
    """Saves notes instead of known tensors for the backward of one layer."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, int, Callable[[], Tensor]]] = []

    @contextmanager
    def saved_instead(self) -> Iterator["_Notes"]:
        """A context in which autograd saves a note instead of each known tensor."""
        with saved_tensors_hooks(self._pack, _unpack):
            try:
                yield self
            finally:
                # autograd holds on to the hooks, and they to this object.
                self._known.clear()

    def know(self, x: Tensor, restore: Callable[[], Tensor]) -> None:
        """From now on, save a note instead of x, as long as x is not changed in place."""
        if torch.is_grad_enabled():
            self._known.append((x, x._version, restore))

    def _pack(self, x: Tensor) -> _Note | _Kept:
        for known, version, restore in self._known:
            same_memory = x.untyped_storage()._cdata == known.untyped_storage()._cdata
            if same_memory and x.dtype == known.dtype and known._version == version:
                return _Note(restore, x.shape, x.stride(), x.storage_offset() - known.storage_offset())
        return _Kept(x, x._version)


def _unpack(saved: _Note | _Kept) -> Tensor:
    if isinstance(saved, _Note):
        return saved.restore().as_strided(saved.size, saved.strides, saved.offset)
    _check_unchanged([saved.tensor], [saved.version])
    return saved.tensor


def _check_unchanged(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    for x, version in zip(tensors, versions, strict=True):
        if x._version != version:
            kept = f"tensor of shape {tuple(x.shape)} that checkpoint_streams keeps for the backward"
            raise RuntimeError(f"{kept}: expected version {version}, got {x._version}: it was changed in place")
