"""Whether launches have the arguments that their kernels take, without a GPU."""

from typing import Any

from torch import Tensor

from tk_core.kernel import KernelRequest


def check_arguments(request: KernelRequest, args: tuple[Any, ...]) -> None:
    """Each argument of a launch is of its parameter's kind: tensors of its dtype and shape, integers elsewhere."""
    prim_func, name = request.kernel.build(*request.args), request.kernel.name
    assert len(args) == len(prim_func.params), name
    for param, arg in zip(prim_func.params, args):
        buffer = prim_func.buffer_map.get(param)
        assert isinstance(arg, Tensor) == (buffer is not None), f"{name}: {param}"
        if buffer is not None:
            assert str(arg.dtype).removeprefix("torch.") == buffer.dtype, f"{name}: {param}"
            for size, wanted in zip(arg.shape, buffer.shape, strict=True):
                assert not hasattr(wanted, "value") or size == wanted.value, f"{name}: {param}"
