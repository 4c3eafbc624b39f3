"""Per-token casts in plain PyTorch: `reference.cast` with blocks of one token."""

import torch

from tk_quant.reference.lib.cast import cast, cast_sf_only


def per_token_cast(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_token_cast."""
    return cast(
        x,
        fmt,
        (1, num_per_channels),
        None,
        x_block_size,
        round_sf,
        use_tma_aligned_col_major_sf,
        use_packed_ue8m0,
        use_swizzled_sf=use_swizzled_sf,
        tensor_sf=tensor_sf,
    )


def per_token_cast_to_e5m6(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tk_quant.per_token_cast_to_e5m6."""
    return per_token_cast(x, "e5m6", num_per_channels, None, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)


def per_token_cast_with_sf_only(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """See tk_quant.per_token_cast_with_sf_only."""
    return cast_sf_only(
        x,
        fmt,
        (1, num_per_channels),
        x_block_size,
        round_sf,
        use_tma_aligned_col_major_sf,
        use_packed_ue8m0,
        use_swizzled_sf=use_swizzled_sf,
        tensor_sf=tensor_sf,
    )


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """See tk_quant.per_token_cast_with_precomputed_sf."""
    return cast(
        x,
        fmt,
        (1, num_per_channels),
        sf,
        x_block_size,
        round_sf,
        use_tma_aligned_col_major_sf,
        use_packed_ue8m0,
    )
