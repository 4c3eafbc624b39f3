"""Reference of mhc_prenorm_gemm."""

import torch
from torch import Tensor

# Splits and groups begin at multiples of this many channels.
_BLOCK = 64


def mhc_prenorm_gemm(residual: Tensor, fn: Tensor, n_splits: int, *, num_rms_groups: int = 1) -> tuple[Tensor, Tensor]:
    """Partial sums of x · fnᵀ and x², one for each split of the m·H channels x of a token.

    The channels form num_rms_groups groups of equally many blocks of 64. Split s has the blocks from ⌊s·B/n_splits⌋
    to before ⌊(s+1)·B/n_splits⌋ of the B blocks of a group; a split without blocks sums to 0. In the dtype of fn.
    Returns mul (n_splits, T, rows of fn) and sqrsum (n_splits, T), T tokens; with several groups (n_splits, T, groups,
    rows of fn) and (n_splits, T, groups).
    """
    x = residual.flatten(-2).to(fn.dtype).reshape(-1, num_rms_groups, fn.shape[1] // num_rms_groups)
    fn = fn.unflatten(1, (num_rms_groups, -1))
    num_blocks = x.shape[-1] // _BLOCK
    mul, sqrsum = [], []
    for split in range(n_splits):
        first, end = (_BLOCK * (s * num_blocks // n_splits) for s in (split, split + 1))
        part = x[..., first:end]
        mul.append(torch.einsum("tgk,rgk->tgr", part, fn[..., first:end]))
        sqrsum.append(part.square().sum(-1))
    if num_rms_groups == 1:
        return torch.stack(mul).squeeze(2), torch.stack(sqrsum).squeeze(2)
    return torch.stack(mul), torch.stack(sqrsum)
