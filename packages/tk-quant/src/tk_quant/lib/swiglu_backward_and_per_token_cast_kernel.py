"""The kernel of swiglu_backward_and_per_token_cast; see there for the formulas and a picture."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_quant.swiglu.swiglu_forward import Given

_MAX_LANES = 256


@dataclass(frozen=True)
class SwigluBackwardConfig:
    """Launch knobs: how the threads of a thread block are laid out over rows and channels."""

    vec: int
    """Neighbouring channels of each half that a thread takes at a time: a piece."""
    pieces: int
    """Pieces that a thread takes in its row, one after the other."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Rows that a thread block works on at a time."""
    blocks_per_sm: int
    """Thread blocks that have to fit on an SM, which caps registers."""
    turns: int
    """Most turns of a thread block: in each it works on `rows` rows and loads those of the next turn."""

    @staticmethod
    @cache
    def best(hidden: int, num_per_channels: int, arch: Arch) -> "SwigluBackwardConfig":
        """The configuration for `hidden` channels and groups of `num_per_channels`."""
        vec = 8
        num_lanes = hidden // vec
        pieces = ceil_div(num_lanes, _MAX_LANES)
        lanes = align(ceil_div(num_lanes, pieces), num_per_channels // vec)
        # H200, 34560 x 2 * 2048, groups of 128: 218.0 us with three turns (61 registers), 219.6 with four, 223.3 with
        # two, 252.5 with one; 222.7 at 16 channels and 80 registers a thread without turns. With several rows at a time
        # two turns are best: three take 2.5 % longer for hidden 288 and 384. Fewer registers don't suffice.
        rows = 1
        if pieces == 1:
            # Maximizes the threads on an SM that have a row. An SM has room for 1024 threads of 64 registers.
            candidates = range(ceil_div(96, lanes), max(_MAX_LANES // lanes, ceil_div(96, lanes)) + 1)
            rows = max(candidates, key=lambda rows: 1024 // align(lanes * rows, 32) * lanes * rows)
        blocks_per_sm = max(1024 // align(lanes * rows, 32), 1)
        return SwigluBackwardConfig(vec, pieces, lanes, rows, blocks_per_sm, ceil_div(3 if rows == 1 else 2, pieces))

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return align(self.lanes * self.rows, 32)

    def turns_of(self, num_positions: int, num_sms: int) -> int:
        """Turns of each thread block: as many as still leave two waves of thread blocks, at most `self.turns`."""
        return min(max(num_positions // (2 * self.rows * self.blocks_per_sm * num_sms), 1), self.turns)

    def num_blocks(self, num_positions: int, turns: int, num_pairs: int) -> int:
        """Thread blocks of a launch, which cover all rows in `turns` turns, and all pairs with a thread each."""
        return max(ceil_div(num_positions, self.rows * turns), ceil_div(num_pairs, self.threads))


# H200, 34560 x 2 * 2048: 220 us where a tile-level kernel takes 264; docs/tuning/tile-level/swiglu.md.
# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def swiglu_backward_kernel(
    alignments: tuple[int, int],
    hidden: int,
    num_per_channels: int,
    round_sf: bool,
    clamps: bool,
    config: SwigluBackwardConfig,
    arch: Arch,
) -> Any:
    """Build the kernel; `alignments` are those of the rows of x and of grad_out, from `check.row_alignment`."""
    import tilelang.language as T

    from tk_quant.lib import swiglu_backward_and_per_token_cast_steps as steps

    vec, pieces, lanes, rows = config.vec, config.pieces, config.lanes, config.rows
    threads, most_rows = config.threads, rows * config.turns
    assert most_rows <= threads
    code_words, bf16_words = vec // 4, vec // 2
    sf_cols = 2 * hidden // num_per_channels
    given = Given(weights=True, experts=False, clamp=clamps)
    assert 32 % (num_per_channels // vec) == 0
    assert lanes * vec % num_per_channels == 0
    assert lanes * pieces * vec >= hidden

    num_positions, num_tokens, num_topk = T.dynamic("num_positions"), T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def swiglu_backward_and_per_token_cast(
        x: T.Tensor((num_positions, 2 * hidden), "float8_e4m3fn"),
        x_sf: T.Tensor((num_positions, sf_cols), "float32"),
        grad_out: T.Tensor((num_positions, hidden), "bfloat16"),
        weight: T.Tensor((num_tokens, num_topk), "float32"),
        pos_to_token_topk: T.Tensor((num_positions,), "int32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        out: T.Tensor((num_positions, hidden), "bfloat16"),
        x_grad_data: T.Tensor((num_positions, 2 * hidden), "float8_e4m3fn"),
        x_grad_sf: T.Tensor((num_positions, sf_cols), "float32"),
        x_grad: T.Tensor((num_positions, 2 * hidden), "bfloat16"),
        weight_grad: T.Tensor((num_tokens, num_topk), "float32"),
        clamp: T.float32,
        least_amax: T.float32,
        num_pairs: T.int32,
        turns: T.int32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            thread = T.get_thread_binding()
            lane = thread % lanes
            codes, next_codes = T.alloc_local((2, code_words), "uint32"), T.alloc_local((2, code_words), "uint32")
            x_scale, next_x_scale = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            grad, next_grad = T.alloc_local((1, bf16_words), "uint32"), T.alloc_local((1, bf16_words), "uint32")
            values = T.alloc_local((3, vec), "float32")
            row_sum = T.alloc_var("float32")
            index, pair_row = T.alloc_var("int32"), T.alloc_var("int32")
            row_sums = T.alloc_shared((config.turns * threads,), "float32")
            indices, targets = T.alloc_shared((most_rows,), "int32"), T.alloc_shared((most_rows,), "int32")
            weights = T.alloc_shared((most_rows,), "float32")
            tile_rows = rows * turns

            if thread < tile_rows:
                row = block * tile_rows + thread
                index = T.reinterpret(T.ldg32(pos_to_token_topk[row], pred=row < num_positions), "int32")
                index = T.if_then_else(row < num_positions and index < num_pairs, index, -1)
                indices[thread] = index
            T.sync_threads()
            own_row = thread // lanes
            steps.load_piece(
                *(x, x_sf, grad_out, next_codes, next_x_scale, next_grad),
                *(T.cast(block * tile_rows + own_row, "int64"), lane * vec),
                thread < lanes * rows and lane * vec < hidden and indices[own_row] >= 0,
                alignments,
            )
            if thread < tile_rows:
                weights[thread] = T.reinterpret(T.ldg32(weight[0, index], pred=index >= 0), "float32")
                pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, index], pred=index >= 0), "int32")
                targets[thread] = T.if_then_else(pair_row == block * tile_rows + thread, index, -1)
            T.sync_threads()
            row_sum = T.float32(0)
            for step in T.serial(turns * pieces):
                of_tile = step // pieces * rows + own_row
                # Variables: inside an address these sums would be computed in 64 bits.
                row, next_row = T.alloc_var("int32"), T.alloc_var("int32")
                row = block * tile_rows + of_tile
                wide_row = T.cast(row, "int64")
                col = (step % pieces * lanes + lane) * vec
                in_row = thread < lanes * rows and row < num_positions and col < hidden
                for half in T.unroll(2):
                    x_scale[half] = next_x_scale[half]
                    for j in T.unroll(code_words):
                        codes[half, j] = next_codes[half, j]
                for j in T.unroll(bf16_words):
                    grad[0, j] = next_grad[0, j]
                next_of_tile = (step + 1) // pieces * rows + own_row
                next_row = block * tile_rows + next_of_tile
                next_col = ((step + 1) % pieces * lanes + lane) * vec
                wanted = step + 1 < turns * pieces and thread < lanes * rows and next_col < hidden
                steps.load_piece(
                    *(x, x_sf, grad_out, next_codes, next_x_scale, next_grad),
                    *(T.cast(next_row, "int64"), next_col),
                    wanted and indices[next_of_tile] >= 0,
                    alignments,
                )
                if in_row and indices[of_tile] >= 0:
                    steps.differentiate(codes, x_scale, grad, weights[of_tile], clamp, values, row_sum, given)
                else:
                    for j in T.unroll(vec):
                        values[0, j] = T.float32(0)
                        values[1, j] = T.float32(0)
                        values[2, j] = T.float32(0)
                if in_row:
                    steps.store_bf16(out, values, 0, wide_row, col)
                    steps.store_bf16(x_grad, values, 1, wide_row, col)
                    steps.store_bf16(x_grad, values, 2, wide_row, hidden + col)
                steps.quantize(values, x_grad_data, x_grad_sf, wide_row, col, in_row, least_amax, lanes, round_sf)
                if step % pieces == pieces - 1:
                    row_sums[step // pieces * threads + thread] = row_sum
                    row_sum = T.float32(0)

            T.sync_threads()
            steps.store_row_sums(row_sums, targets, weight_grad, row_sum, thread, tile_rows, threads, rows, lanes)

            if block < T.ceildiv(num_pairs, threads):
                pair = block * threads + thread
                pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, pair], pred=pair < num_pairs), "int32")
                index = -1
                if pair_row >= 0 and pair_row < num_positions:
                    index = pos_to_token_topk[pair_row]
                if pair < num_pairs and index != pair:
                    weight_grad[0, pair] = T.float32(0)

    return swiglu_backward_and_per_token_cast
