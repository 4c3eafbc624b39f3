"""Launch configuration of get_fused_mapping; get_fused_mapping_kernel.py has a picture."""

from dataclasses import dataclass
from functools import cache

from tk_core.arch import Arch
from tk_core.math import align


@dataclass(frozen=True)
class GetFusedMappingConfig:
    """How the pairs are distributed over thread blocks."""

    warps: int
    """Warps of a thread block, which has at least one thread per expert."""
    cluster_size: int
    """Thread blocks of a cluster; 0 for two launches with any number of thread blocks."""
    num_clusters: int
    """Number of clusters, each of which counts all pairs."""
    room: int
    """Pairs that fit in a thread block's shared memory."""
    rounds: int
    """Loads that a thread has in flight: while it counts with one launch, while it ranks in the second of two."""

    @property
    def max_pairs(self) -> int:
        """Most pairs that one launch takes; the counts of a chunk are 16-bit."""
        return self.cluster_size * min(self.num_clusters * self.room, 2**16 - 32 * self.num_clusters)

    @staticmethod
    @cache
    def best(num_pairs: int, num_experts: int, num_sms: int, arch: Arch) -> "GetFusedMappingConfig":
        """The configuration for `num_pairs` pairs, rounded up to a power of two, on `num_sms` SMs."""
        # Fewer warps are faster, but every expert needs a thread. For few pairs a cluster's barrier costs too much.
        warps = 16 if num_experts <= 512 else 32
        few_warps = 8 if num_experts <= 256 else warps
        candidates = [GetFusedMappingConfig(few_warps, 1, min(num_sms, 32), 128, 16)]
        if arch.sm >= 90 and num_sms >= 8:
            # More clusters would repeat the counting more often, and some of their blocks would share an SM.
            num_clusters = min(num_sms // 8, 8)
            rounds = 8 if num_pairs <= 32768 else 16
            candidates.append(GetFusedMappingConfig(warps, 8, num_clusters, 2048, rounds))
        else:
            candidates.append(GetFusedMappingConfig(few_warps, 1, min(num_sms, 32), 512, 16))
        candidates += [GetFusedMappingConfig(warps, 0, 1, room, 8) for room in (4096, 2048, 512)]
        for config in candidates:
            fits = config.shared_memory_bytes(num_experts) <= arch.max_shared_memory
            if fits and (config.cluster_size == 0 or num_pairs <= config.max_pairs):
                return config
        raise AssertionError(f"no configuration of get_fused_mapping fits {arch}")

    @staticmethod
    def finds_equals_in_memory(num_experts: int) -> bool:
        """Whether lanes find equal experts by a word per warp and expert in shared memory, which fits up to 512."""
        return num_experts <= 512

    def shared_memory_bytes(self, num_experts: int) -> int:
        """Shared memory of a thread block, without the padding that aligns the arrays."""
        per_warp = 6 if self.finds_equals_in_memory(num_experts) else 2
        rows = 2 * (max(self.cluster_size, 1) + 1) * align(num_experts, 8)
        return per_warp * self.warps * num_experts + rows + 4 * (2 * self.room + 6 * num_experts + 2 * self.warps)
