"""Reference of engram_hash."""

import torch
from torch import Tensor


def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    *,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """(p_0 xor … xor p_n) mod vocab_sizes[l, n - 1, m] + offsets[l, (n - 1)·M + m], p_i = id_i · multipliers[l, i].

    ngram_token_ids (T, N), multipliers (L, N), vocab_sizes (L, N - 1, M), offsets (L, (N - 1)·M) → (L, T, (N - 1)·M).
    Products wrap in int64; the remainder is never negative. Tokens of image_token_mask (T) get -1.
    """
    products = ngram_token_ids.long() * multipliers[:, None]
    hashes = products[..., 0]
    remainders = []
    for n in range(1, products.shape[-1]):
        hashes = hashes ^ products[..., n]
        remainders.append(torch.remainder(hashes[..., None], vocab_sizes[:, None, n - 1].long()))
    out = (torch.cat(remainders, -1) + offsets[:, None]).int()
    return out if image_token_mask is None else out.masked_fill(image_token_mask[:, None], -1)
