"""Trees of arguments and outputs: tuples, lists and dicts with tensors at their leaves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same tree with `function` applied to each tensor."""
    return tree_map_only(Tensor, function, tree)


def empty(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str, first_element: int = 0
) -> Tensor:
    """A contiguous tensor, not initialized, that starts at element `first_element` of its storage."""
    size = torch.Size(shape)
    return torch.empty(first_element + size.numel(), dtype=dtype, device=device)[first_element:].view(size)


def storage_bytes(x: Tensor) -> Tensor:
    """All bytes of a tensor's storage, gaps between strided rows included, as a uint8 tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def unaligned(x: Tensor) -> Tensor:
    """A copy with the same strides and bytes that begins one element later in a storage of its own."""
    size = x.element_size()
    num_bytes = x.untyped_storage().nbytes() + size
    storage = torch.empty(num_bytes, dtype=torch.uint8, device=x.device, pin_memory=x.is_pinned())
    storage[size:] = storage_bytes(x)
    return storage.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset() + 1)


def transfer(tree: Any, device: torch.device | str | None = None) -> Any:
    """Copies with equal strides, offsets and bits, gaps included; tensors that shared a storage share one again."""
    copies: dict[tuple[torch.device, int], Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        key = x.device, x.untyped_storage().data_ptr()
        if key not in copies:
            copies[key] = storage_bytes(x).to(device if device is not None else x.device, copy=True)
        made = torch.empty(0, dtype=x.dtype, device=copies[key].device)
        return made.set_(copies[key].untyped_storage(), x.storage_offset(), x.shape, x.stride())

    return map_tensors(copy, tree)


def distinct_bytes(tree: Any) -> int:
    """Bytes of a tree's tensors; one that appears twice (an output that is also an argument) counts once."""
    seen = {(x.data_ptr(), x.dtype, x.shape): x.numel() * x.element_size() for x in tensors(tree)}
    return sum(seen.values())
