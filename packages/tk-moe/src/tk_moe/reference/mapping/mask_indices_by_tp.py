"""Reference of mask_indices_by_tp."""

import torch


def mask_indices_by_tp(
    indices: torch.Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> torch.Tensor:
    """Indices of the experts that a tensor-parallel rank has, renumbered; -1 for all others."""
    per_rank = n // num_ep_ranks
    # The index of a rank's first expert may exceed 32 bits.
    wide = indices.long()
    shifted = wide - tp_rank * per_rank
    renumbered = shifted - shifted.div(per_rank * num_tp_ranks, rounding_mode="floor") * (per_rank * (num_tp_ranks - 1))
    rank = wide.div(per_rank, rounding_mode="floor") % num_tp_ranks
    return torch.where((wide >= 0) & (rank == tp_rank), renumbered, -1).to(indices.dtype)
