"""`cast` to a dtype in plain PyTorch; and the block cast of the same name, which the second argument tells apart."""

from functools import wraps
from typing import Any

import torch

from tk_core.reference.quantize import encode_e4m3
from tk_quant.reference import quantizer
from tk_quant.reference.stochastic import round_stochastically


def _cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    stochastic_rounding: bool = False,
    *,
    seed: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """See tk_quant.cast."""
    if dtype is x.dtype:
        return x.clone(memory_format=torch.contiguous_format)
    values = x.float()
    if stochastic_rounding:
        index = torch.arange(x.numel() // 4, device=x.device)
        fmt = "e4m3" if dtype is torch.float8_e4m3fn else "bf16"
        values = round_stochastically(values.flatten(), fmt, index, seed).view(x.shape)
    if dtype is torch.float8_e4m3fn:
        return encode_e4m3(values)
    # A GPU writes every NaN like this; a CPU keeps its sign and payload, as does a GPU where bfloat16 widens.
    is_nan = values.isnan()
    if dtype is torch.float32:
        if x.dtype is torch.float8_e4m3fn:
            values.view(torch.int32).masked_fill_(is_nan, 0x7FFFFFFF)
        return values
    values = values.to(dtype)
    values.view(torch.int16).masked_fill_(is_nan, 0x7FFF)
    return values


@wraps(_cast)
def cast(x: Any, *args: Any, **options: Any) -> Any:
    """See tk_quant.cast; with the name of a format for the dtype, `quantizer.cast`, which quantizes by blocks."""
    to = args[0] if args else options.get("dtype", options.get("fmt"))
    return (_cast if isinstance(to, torch.dtype) else quantizer.cast)(x, *args, **options)
