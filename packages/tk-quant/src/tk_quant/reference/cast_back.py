"""Reference of cast_back."""

import torch

from tk_quant.reference.formats import dequantize

_OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cast_back(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
) -> torch.Tensor:
    """data * sf of its block, rounded to float32, then to the output type; any NaN is 0x7fffffff (bf16: 0x7fff)."""
    if x_special_fmt is not None:
        raise ValueError(f"x_special_fmt: expected None, got {x_special_fmt!r}")
    # Blocks wider than a row would be expanded to their full width on the way.
    block_size = x_block_size[0], min(x_block_size[1], 2 * x[0].shape[1])
    out = dequantize(x, block_size).to(_OUT_DTYPES[fmt])
    # What GPUs make of any NaN; a CPU keeps sign and payload of one that it is given.
    if fmt == "bf16":
        out.view(torch.int16).masked_fill_(out.isnan(), 0x7FFF)
    else:
        out.view(torch.int32).masked_fill_(out.isnan(), 0x7FFFFFFF)
    return out
