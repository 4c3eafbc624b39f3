"""The size of thread block clusters."""

from tk_core.arch import Arch


def largest_cluster(num_sms: int, arch: Arch) -> int:
    """Number of thread blocks of the largest cluster that fits on `num_sms` SMs; 1 where clusters of 8 do not."""
    if arch.sm < 90 or num_sms < 8:
        return 1
    # The blocks of a cluster share a GPC. If 8 GPCs have more than 120 SMs together, one of them has at least 16.
    return 16 if arch.sm in (90, 100, 103) and num_sms > 120 else 8
