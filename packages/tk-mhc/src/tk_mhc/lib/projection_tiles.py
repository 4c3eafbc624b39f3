"""The projection's work on tiles; these macros fix its arithmetic, for few tokens as for many."""

from typing import Any, NamedTuple

import tilelang.language as T


class SplitSteps(NamedTuple):
    """Where splits begin and end, in steps of a few blocks of channels, counted from the first channels on."""

    n_splits: int
    num_blocks: int
    blocks_a_step: int

    def first(self, split: Any) -> Any:
        """The split's first step; for n_splits how many steps there are."""
        return split * self.num_blocks // self.n_splits // self.blocks_a_step

    def done(self, step: Any) -> Any:
        """One more than the index of the split in which the step ends."""
        return T.ceildiv((step + 1) * self.blocks_a_step * self.n_splits, self.num_blocks)

    def ends_split(self, step: Any) -> Any:
        """Whether a split ends with the step."""
        return self.done(step) * self.num_blocks < ((step + 1) * self.blocks_a_step + 1) * self.n_splits


@T.macro
def convert_weights(fn_tile: T.Buffer, weight: Any, parts: T.Buffer) -> None:
    """parts[0] = fn_tile · weight, rounded to bfloat16, and parts[1] = the rest, rounded; weight may be None.

    Rows of parts beyond fn_tile's last are left alone.
    """
    for j, c in T.Parallel(*fn_tile.shape):
        value = fn_tile[j, c] if weight is None else fn_tile[j, c] * weight[c]
        parts[0, j, c] = T.cast(value, "bfloat16")
        parts[1, j, c] = T.cast(value - T.cast(T.cast(value, "bfloat16"), "float32"), "bfloat16")


@T.macro
def add_squares(x_tile: T.Buffer, squares: T.Buffer) -> None:
    """squares[i, c] += x_tile[i, c]²; if squares has fewer columns, for each part of the tile that is as wide."""
    block_tokens, columns = squares.shape
    for part in T.unroll(x_tile.shape[1] // columns):
        for i, c in T.Parallel(block_tokens, columns):
            value = T.cast(x_tile[i, part * columns + c], "float32")
            squares[i, c] = T.fma(value, value, squares[i, c])


@T.macro
def write_sums(sums: T.Buffer, mul: T.Buffer, split: Any, first_token: Any, first_row: Any, num_rows: int) -> None:
    """mul[split, first_token + i, first_row + j] = sums[i, j] for tokens that exist and the first num_rows columns."""
    for i, j in T.Parallel(*sums.shape):
        if first_token + i < mul.shape[1] and j < num_rows:
            mul[split, first_token + i, first_row + j] = sums[i, j]


@T.macro
def write_squares(
    square_sum: T.Buffer, sqrsum: T.Buffer, split: Any, first_token: Any, group: Any, num_rms_groups: int
) -> None:
    """sqrsum[split, (first_token + i) · num_rms_groups + group] = square_sum[i] for tokens that exist."""
    for i in T.Parallel(square_sum.shape[0]):
        if (first_token + i) * num_rms_groups + group < sqrsum.shape[1]:
            sqrsum[split, (first_token + i) * num_rms_groups + group] = square_sum[i]
