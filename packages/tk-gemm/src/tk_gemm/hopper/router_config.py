"""How the router's product is cut into work: what fixes its bits, and what is free to choose for speed."""

from typing import Literal, NamedTuple

from tk_core.arch import Arch
from tk_core.math import ceil_div

RUN = 64
"""Channels whose products the tensor core sums on its own; their sum is then added to the chunk's in float32."""
BANK_ROW = 32
"""float32 channels in 128 bytes, the width of TMA's swizzle."""
PADDING = 8
"""Columns that keep apart in banks the rows of a group's sums in shared memory."""

Output = Literal["chunks", "groups"]
"""What a thread block writes: the sums of each chunk that it takes, or of each group of chunks."""


class Cut(NamedTuple):
    """How K is cut: chunk i has runs ⌊i·R/C⌋ to ⌊(i+1)·R/C⌋ - 1 of R, group i likewise chunks. It fixes the bits."""

    num_chunks: int
    num_groups: int

    @staticmethod
    def of(k: int) -> "Cut":
        """Chunks of up to eight runs, in four groups where there are as many runs."""
        num_runs = k // RUN
        num_chunks = min(num_runs, 4 * ceil_div(num_runs, 32))
        return Cut(num_chunks, min(num_chunks, 4))


class RouterConfig(NamedTuple):
    """Tile and what is written; any gives the same bits."""

    block_experts: int
    """64 for each multiplying warpgroup."""
    block_tokens: int
    output: Output

    def num_stages(self, arch: Arch) -> int:
        """Runs in flight: as many as shared memory has room for, six at most."""
        room = arch.max_shared_memory - 2048
        if self.output != "chunks":
            room -= 4 * self.block_experts * (self.block_tokens + PADDING)
        return min(6, room // (RUN * (4 * self.block_experts + 2 * self.block_tokens)))


class Plan(NamedTuple):
    """A launch: its tile and how many thread blocks share the chunks or groups of a tile."""

    config: RouterConfig
    num_workers: int

    @staticmethod
    def best(m: int, n: int, k: int, num_sms: int) -> "Plan":
        """The first of these ways that leaves at most one thread block an SM, or the last: ever more work for each."""
        num_chunks, num_groups = Cut.of(k)
        for block_experts, block_tokens, output, num_workers in (
            (64, 8, "chunks", num_chunks),
            (64, 64, "chunks", num_chunks),
            (128, 128, "chunks", num_chunks),
            (64, 128, "groups", num_groups),
            (128, 128, "groups", num_groups),
            (128, 128, "groups", min(num_groups, 2)),
        ):
            config = RouterConfig(block_experts if n > 64 else 64, block_tokens, output)
            if ceil_div(m, config.block_tokens) * ceil_div(n, config.block_experts) * num_workers <= num_sms:
                break
        return Plan(config, num_workers)

    def num_parts(self, k: int) -> int:
        """Sums that are written for each element of the result."""
        num_chunks, num_groups = Cut.of(k)
        return num_chunks if self.config.output == "chunks" else num_groups
