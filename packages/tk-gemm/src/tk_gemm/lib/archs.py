"""The architectures that the products' kernels are for."""

from torch import Tensor

from tk_core.arch import Arch, UnsupportedArchError, get_arch


def hopper_or_blackwell(op: str, x: Tensor) -> Arch:
    """The architecture of x's device; UnsupportedArchError, with the op's name, unless it is Hopper or Blackwell."""
    arch = get_arch(x.device)
    if not (arch.has_wgmma or arch.has_tcgen05):
        raise UnsupportedArchError(op, arch.name, "sm_90a, sm_100a, or the reference backend")
    return arch


def arch_of_factors(op: str, sf: Tensor) -> Arch:
    """The architecture of sf's device; UnsupportedArchError unless Hopper for float32, Blackwell for packed factors."""
    arch = get_arch(sf.device)
    is_packed = not sf.is_floating_point()
    if not (arch.has_tcgen05 if is_packed else arch.has_wgmma):
        found = f"{arch.name} and {'packed UE8M0' if is_packed else 'float32'} scale factors"
        raise UnsupportedArchError(op, found, "float32 on sm_90a, packed ones on sm_100a, or the reference backend")
    return arch
