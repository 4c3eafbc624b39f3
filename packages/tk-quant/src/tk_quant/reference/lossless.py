"""Reference of per_block_cast_lossless."""

import torch

from tk_core.math import ceil_div
from tk_core.reference.quantize import decode_e2m1, encode_e4m3
from tk_core.reference.scales import decode_ue8m0, pack_scales, unpack_scales
from tk_core.scales import scale_layout
from tk_quant.reference.formats import expand_blocks
from tk_quant.reference.quantizer import block_amax

_LOG2_OF_ROOM = 6
_NAN_EXPONENT = 255


def sf_exponents(sf: torch.Tensor, num_rows: int, num_cols: int) -> torch.Tensor:
    """Biased exponents, int32 (num_rows, num_cols), of scale factors in any layout: a float32 by its exponent bits."""
    return (unpack_scales(sf, num_rows, num_cols).view(torch.int32) >> 23) & 0xFF


def per_block_cast_lossless(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_block_cast_lossless: e2m1 times 2**(exponent - out exponent), rounded to e4m3."""
    if fmt != "e4m3":
        raise ValueError(f"fmt: expected 'e4m3', got {fmt!r}")
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    values = decode_e2m1(x[0])
    shape = values.shape
    exponents = sf_exponents(x[1], ceil_div(shape[0], x_block_size[0]), ceil_div(shape[1], x_block_size[1]))
    blocks_of_block = (out_block_size[0] // x_block_size[0], out_block_size[1] // x_block_size[1])
    largest = block_amax(exponents, blocks_of_block).to(torch.int32)
    out_exponents = (largest - _LOG2_OF_ROOM).clamp(min=1)
    shifts = expand_blocks(exponents, x_block_size, *shape) - expand_blocks(out_exponents, out_block_size, *shape)
    # 2**-126 already rounds every code to zero.
    powers = ((shifts.clamp(min=-126) + 127) << 23).view(torch.float32)
    sf = decode_ue8m0(torch.where(largest == _NAN_EXPONENT, _NAN_EXPONENT, out_exponents))
    return encode_e4m3(values * powers), pack_scales(sf, layout)
