"""interleave_gate_and_up: rows of an expert's first weights in the order that the SwiGLU product takes."""

import torch

from tk_core import check
from tk_gemm.lib.operands import E4M3, FACTORS, per_block_factors, positive_multiple


def interleave_gate_and_up(b: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows [gate | up] of each group in runs of 128: gate, up, gate, up, … once, when weights are loaded.

    A thread block of `m_grouped_fp8_gemm_swiglu_nt_contiguous` then has the gate and up columns of its outputs. Plain
    PyTorch on any device.

    Args:
        b: `(data, sf)`: float8_e4m3fn (G, 2 · I, K), the gate's rows first, I and K multiples of 128, contiguous;
            float32 sf (G, 2 · I / 128, K / 128), or int32 (G, 2 · I / 128, ⌈K / 512⌉) as Blackwell takes it.

    Returns:
        `(data, sf)`, new tensors of the same shapes.

    Raises:
        TypeError: b is no pair, or a tensor has another dtype.
        ValueError: A shape, stride or device is not as described.
    """
    check.require_type(isinstance(b, (tuple, list)) and len(b) == 2, "b", "a pair (data, sf)", type(b).__name__)
    data, sf = b
    num_groups, num_rows, num_channels = check.tensor("b[0]", data, E4M3, ("G", "2 * I", "K"))
    positive_multiple("b[0] (2 * I)", num_rows, 256)
    positive_multiple("b[0] (K)", num_channels, 128)
    shape = (num_groups, num_rows // 128, num_channels // 128)
    per_block_factors("b[1]", sf, shape, data.device, FACTORS)
    from tk_gemm.reference.layout.interleave_gate_and_up import interleave_gate_and_up as interleave

    return interleave((data, sf))
