"""unpack_from_e2m1fn_x2 in plain PyTorch."""

import torch

from tk_core.reference.quantize import decode_e2m1


def unpack_from_e2m1fn_x2(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Nibbles (..., n) to floats (..., 2 * n), the low nibble of a byte first."""
    return decode_e2m1(x).to(out_dtype)
