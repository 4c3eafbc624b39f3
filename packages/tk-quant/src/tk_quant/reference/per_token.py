"""Per-token casts in plain PyTorch: `reference.cast` with blocks of one token."""

import torch

from tk_quant.reference.quantizer import cast, written


def per_token_cast(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
    seed: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_token_cast."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0, use_e4m3_sf)
    options = {"use_swizzled_sf": use_swizzled_sf, "tensor_sf": tensor_sf, "sf_clamp_min": sf_clamp_min}
    options |= {"stochastic_cast": stochastic_cast, "seed": seed}
    return written(out, cast(x, fmt, (1, num_per_channels), None, x_block_size, *flags, **options))


def per_token_cast_to_e5m6(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_token_cast_to_e5m6."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, "e5m6", num_per_channels, None, *flags, sf_clamp_min=sf_clamp_min)


def per_token_cast_with_sf_only(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: torch.Tensor | None = None,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> torch.Tensor:
    """See tk_quant.per_token_cast_with_sf_only."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0, use_e4m3_sf)
    options = {"use_swizzled_sf": use_swizzled_sf, "tensor_sf": tensor_sf, "sf_clamp_min": sf_clamp_min}
    return written(out_sf, cast(x, fmt, (1, num_per_channels), None, x_block_size, *flags, **options)[1])


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See tk_quant.per_token_cast_with_precomputed_sf."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    return written(out, cast(x, fmt, (1, num_per_channels), sf, x_block_size, *flags))
