"""The ends of groups along K."""

import weakref

import pytest
import torch

from tk_gemm import k_grouped


def test_sums_of_sizes_are_made_once() -> None:
    cpu = torch.device("cpu")
    sums = k_grouped._ends_of([128, 0, 256], cpu)
    assert sums.dtype is torch.int32
    assert sums.tolist() == [128, 128, 384]
    assert k_grouped._ends_of([128, 0, 256], cpu) is sums
    assert k_grouped._ends_of(sums, cpu) is sums


@pytest.mark.gpu
def test_sums_in_a_graph_outlive_the_cache() -> None:
    cuda = torch.device("cuda")
    k_grouped._ends_of([128, 256], cuda)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        sums = weakref.ref(k_grouped._ends_of([128, 256], cuda))
    k_grouped._sums.cache_clear()
    assert sums() is not None
