"""Sizes that the ops take, and in how many parts their sums are taken, which kernels and references share."""

import torch

MAX_STREAMS = 8
HIDDEN_MULTIPLE = 64
"""Every hidden size is a multiple of it."""
MAX_HIDDEN = 16384
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
"""Parameters as a model keeps them, with autocast or without."""

NUM_PARTIALS = 396
"""Ranges of rows over which `engram_sinkhorn_step` sums, whatever the GPU: three for each SM of an H200."""


def num_token_ranges(mhc_mult: int, hidden: int) -> int:
    """Ranges of tokens over which the weight's gradient is summed separately: token t belongs to range t mod this.

    One for each thread block that walks over tokens, which are one to four on each of an H200's 132 SMs: more than one
    while their m · H sums take up to a quarter of its registers. It depends on nothing else, so no bit of a gradient
    depends on the number of SMs.
    """
    return 132 * max(1, min(4, 16384 // (mhc_mult * hidden)))
