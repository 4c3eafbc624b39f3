"""Per-block casts in plain PyTorch: `reference.cast` without its quantized input."""

import torch

from tk_quant.reference.quantizer import cast, written


def per_block_cast(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_block_cast."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    return written(out, cast(x, fmt, block_size, None, None, *flags, sf_clamp_min=sf_clamp_min))


def per_block_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: torch.Tensor | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> torch.Tensor:
    """See tk_quant.per_block_cast_with_sf_only."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    return written(out_sf, cast(x, fmt, block_size, None, None, *flags, sf_clamp_min=sf_clamp_min)[1])


def per_block_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See tk_quant.per_block_cast_with_precomputed_sf."""
    return written(out, cast(x, fmt, block_size, sf, None, round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0))
