"""Reference of interleave_gate_and_up."""

import torch

from tk_gemm.check import Pair


def interleave_gate_and_up(b: Pair) -> Pair:
    """Rows [gate | up] of each group in runs of 128: gate, up, gate, … See tk_gemm.interleave_gate_and_up."""
    data, sf = b
    num_groups, num_rows, num_channels = data.shape
    runs = data.view(torch.uint8).view(num_groups, 2, num_rows // 256, 128, num_channels).transpose(1, 2)
    factors = sf.reshape(num_groups, 2, num_rows // 256, -1).transpose(1, 2)
    return runs.reshape(data.shape).view(data.dtype), factors.reshape(sf.shape)
