"""Tiles that thread blocks take on demand, for few thread blocks and for many."""

import pytest
import torch
from torch import Tensor

import tk_gemm
from tk_core.math import align
from tk_core.num_sms import num_sms
from tk_core.testing.numeric import assert_equal
from tk_gemm import launch
from tk_gemm.hopper import tiles

from ..inputs import activations, bf16, ids, psum, weights

pytestmark = pytest.mark.gpu(gib=2)

COUNTS = 130, 0, 1, 300, 128, 0, 257
NUM_ROWS = sum(align(count, 128) for count in COUNTS) + 300
"""With padding behind all groups."""


@pytest.mark.parametrize("with_psum", [False, True])
@pytest.mark.parametrize("count", [1, 3, None])
def test_they_have_the_bits_of_tiles_in_order(
    monkeypatch: pytest.MonkeyPatch, count: int | None, with_psum: bool
) -> None:
    """Called eagerly, and replayed: the counter begins anew each time."""
    n, k = 768, 1024
    a, b = activations(NUM_ROWS, k, "cuda"), weights(n, k, "cuda", len(COUNTS))
    wide_a, wide_b = bf16(NUM_ROWS, k, device="cuda"), bf16(len(COUNTS), n, k, device="cuda")
    groups = psum(COUNTS, "cuda") if with_psum else ids(COUNTS, NUM_ROWS, "cuda")

    def call() -> list[Tensor]:
        fp8 = tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, groups, use_psum_layout=with_psum)
        of_bf16 = tk_gemm.m_grouped_bf16_gemm_nt_contiguous(wide_a, wide_b, None, groups, use_psum_layout=with_psum)
        swiglu = tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(a, b, groups, use_psum_layout=with_psum)
        return [each[: NUM_ROWS - 300].flatten() for each in (fp8, of_bf16, *swiglu)]

    with num_sms(count):
        with monkeypatch.context() as patch:
            for module in (tiles, launch):
                patch.setattr(module, "widest_tile", lambda *_: tiles.ON_DEMAND)
            found = [call(), call()]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = call()
            for _ in range(2):
                for each in replayed:
                    each.fill_(7)
                graph.replay()
                found.append([each.clone() for each in replayed])
        in_order = call()
    for each in found:
        assert_equal(each, in_order)
