"""The architecture that the products' kernels are for."""

from torch import Tensor

from tk_core.arch import Arch, UnsupportedArchError, get_arch


def hopper(op: str, x: Tensor) -> Arch:
    """The architecture of x's device. Raises UnsupportedArchError, with the op's name, if it is not Hopper."""
    arch = get_arch(x.device)
    if not arch.has_wgmma:
        raise UnsupportedArchError(op, arch.name, "sm_90a, or the reference backend")
    return arch
