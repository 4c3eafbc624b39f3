"""make_offsets: the first row of each table when the tables of a layer are stored one after the other."""

import torch
from torch import Tensor

from tk_core import check


def make_offsets(vocab_sizes: Tensor) -> Tensor:
    """Exclusive prefix sums of the sizes of a layer's tables: int32 (L, N - 1, M) → int32 (L, (N - 1)·M).

    Raises ValueError if the rows of a layer do not fit int32; this waits for the device.
    """
    sizes = vocab_sizes.flatten(1)
    ends = sizes.cumsum(1, dtype=torch.int64)
    if not ends.is_meta and ends.numel():
        most = int(ends.max())
        check.require(most < 2**31, "vocab_sizes", "at most 2³¹ - 1 rows a layer", most)
    return (ends - sizes).int()
