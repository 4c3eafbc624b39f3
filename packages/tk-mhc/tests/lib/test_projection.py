"""How the projection shares out splits to thread blocks."""

import pytest
import torch

import tk_core
from tk_core.arch import ARCHS, compiling_for
from tk_mhc.lib.projection import splits_per_worker


@pytest.mark.parametrize(
    ("num_tokens", "num_rms_groups", "expected"), [(1, 1, 1), (64, 8, 2), (1, 8, 2), (65, 8, 4), (4097, 1, 16)]
)
def test_at_most_one_thread_block_for_each_multiprocessor(num_tokens: int, num_rms_groups: int, expected: int) -> None:
    # A tile is 64 tokens of one group, so a single token of eight groups makes eight tiles too.
    with compiling_for(ARCHS["sm_90a"]), tk_core.num_sms(64):
        assert splits_per_worker(num_tokens, num_rms_groups, 16, torch.device("meta")) == expected
