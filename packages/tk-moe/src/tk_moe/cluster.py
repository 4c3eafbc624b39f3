"""How many blocks one cluster may have."""

from tk_core.arch import Arch


def largest_cluster(num_sms: int, arch: Arch) -> int:
    """Blocks of the largest cluster that `num_sms` multiprocessors take; 1 where there are no clusters of 8."""
    if arch.sm < 90 or num_sms < 8:
        return 1
    # The blocks of a cluster share a GPC, and of 8 GPCs with more than 120 multiprocessors one has 16.
    return 16 if arch.sm in (90, 100, 103) and num_sms > 120 else 8
