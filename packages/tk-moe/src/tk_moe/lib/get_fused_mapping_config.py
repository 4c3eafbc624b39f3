"""How the kernels of get_fused_mapping are launched; see get_fused_mapping_kernel.py for a picture."""

from dataclasses import dataclass
from functools import cache

from tk_core.arch import Arch
from tk_core.math import align


@dataclass(frozen=True)
class GetFusedMappingConfig:
    """How the pairs are dealt out to blocks."""

    warps: int
    """Warps of a block; it has a thread for every expert."""
    cluster_size: int
    """Blocks of a cluster; 0 if any number of blocks does it in two launches."""
    num_clusters: int
    """Clusters, of which each counts all pairs."""
    room: int
    """Pairs that a block has room for in shared memory."""
    rounds: int
    """Loads that a thread has under way at a time when it counts."""

    @property
    def max_pairs(self) -> int:
        """Pairs that one launch takes; a chunk's counts have 16 bits."""
        return self.cluster_size * min(self.num_clusters * self.room, 2**16 - 32 * self.num_clusters)

    @staticmethod
    @cache
    def best(num_pairs: int, num_experts: int, num_sms: int, arch: Arch) -> "GetFusedMappingConfig":
        """The configuration for `num_pairs` pairs, rounded up to a power of two, on `num_sms` SMs."""
        # Fewer warps are faster, but there is a thread for every expert. Few pairs are not worth a cluster's barrier.
        warps = 16 if num_experts <= 512 else 32
        few_warps = 8 if num_experts <= 256 else warps
        candidates = [GetFusedMappingConfig(few_warps, 1, min(num_sms, 32), 128, 16)]
        if arch.sm >= 90 and num_sms >= 8:
            # More clusters count as much again, and some of their blocks share multiprocessors.
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
        """Whether a warp has a word for each expert in shared memory; more than 512 would not leave enough of it."""
        return num_experts <= 512

    def shared_memory_bytes(self, num_experts: int) -> int:
        """Shared memory of a block, up to what aligning the arrays adds."""
        per_warp = 6 if self.finds_equals_in_memory(num_experts) else 2
        rows = 2 * (max(self.cluster_size, 1) + 1) * align(num_experts, 8)
        return per_warp * self.warps * num_experts + rows + 4 * (2 * self.room + 6 * num_experts + 2 * self.warps)
