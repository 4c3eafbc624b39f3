"""The projection's splits and steps: what the contract says of them, and that they fit every architecture."""

from itertools import pairwise

import pytest

from tk_core.arch import ARCHS, Arch
from tk_mhc.lib.projection import check_n_splits, default_n_splits
from tk_mhc.lib.projection_config import CHANNEL_BLOCK, ProjectionConfig, Weights

WIDTHS = sorted({m * hidden for m in (1, 2, 4, 8) for hidden in range(64, 8193, 64)})


def edges(width: int, n_splits: int) -> list[int]:
    """First channels of the splits, and the width."""
    num_blocks = width // CHANNEL_BLOCK
    return [s * num_blocks // n_splits * CHANNEL_BLOCK for s in range(n_splits + 1)]


def test_default_splits_are_even_and_at_most_512_channels_long() -> None:
    for width in WIDTHS:
        n_splits = default_n_splits(width)
        assert {end - start for start, end in pairwise(edges(width, n_splits))} == {width // n_splits}, width
        assert width // n_splits <= 512, width


def test_model_widths_have_splits_of_512_channels() -> None:
    assert [default_n_splits(4 * hidden) for hidden in (1280, 2560, 4096, 5120, 7168, 8192)] == [10, 20, 32, 40, 56, 64]


def test_more_splits_than_blocks_count_as_one_a_block() -> None:
    assert check_n_splits(1000, 28672) == 448
    assert check_n_splits(7, 28672) == 7
    assert check_n_splits(None, 28672) == 56


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("num_rows", [2, 4, 8, 16, 24, 80])
@pytest.mark.parametrize("n_splits", [None, 1, 3, 7, 448])
def test_steps_meet_all_splits_whoever_converts_the_weights(arch: Arch, num_rows: int, n_splits: int | None) -> None:
    width = 28672
    splits = check_n_splits(n_splits, width)
    of_weights: tuple[Weights, ...] = ("float32", "normed", "parts") if arch.has_wgmma else ("float32", "normed")
    configs = [ProjectionConfig.best(num_rows, width, splits, weights, arch) for weights in of_weights]
    # The bits depend on the steps, so they are the same whoever converts the weights.
    assert len({config.block_channels for config in configs}) == 1
    assert all(edge % configs[0].block_channels == 0 for edge in edges(width, splits))
