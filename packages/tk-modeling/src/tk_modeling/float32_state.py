"""Float32State: parameters and buffers that stay float32 when the module, or a model around it, is cast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Float32State(nn.Module):
    """A module whose own parameters and buffers keep their dtypes through `to`, `half`, `bfloat16` and `double`.

    What is float32 stays so, and so do integers; devices change as ever, and submodules are cast. A state_dict of
    another floating-point dtype is loaded as float32, with assign=True too.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32State":
        if recurse:
            for module in self.children():
                module._apply(fn)

        def without_cast(x: Tensor) -> Tensor:
            y = fn(x)
            keeps = x.dtype == torch.float32 or not x.is_floating_point()
            return x.to(y.device) if keeps and y.dtype != x.dtype else y

        return super()._apply(without_cast, recurse=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            saved = state_dict.get(prefix + name)
            if own is not None and own.dtype == torch.float32 and isinstance(saved, Tensor):
                state_dict[prefix + name] = saved.float()
        super()._load_from_state_dict(state_dict, prefix, *args)
