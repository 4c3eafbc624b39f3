"""GPU architectures: what a device can do and how to name it to the compiler.

Figures are from NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities" (shared memory that a thread block may ask
for), and the products' data sheets (number of SMs). The number of SMs here is only for compiling without a device; a
launch asks the device (`tk_core.get_num_sms`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tk_core import env


class UnsupportedArchError(RuntimeError):
    """An op has no kernel for the architecture it was called on."""

    def __init__(self, op: str, found: str, needed: str) -> None:
        super().__init__(f"{op}: found {found}, needs {needed}")
        self.op = op
        self.found = found
        self.needed = needed

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.op, self.found, self.needed)


@dataclass(frozen=True, eq=False)
class Arch:
    """One architecture. Instances are unique, so they compare and hash by identity."""

    name: str
    """Target as nvcc names it, such as sm_90a."""
    sm: int
    """Compute capability × 10."""
    num_sms: int
    """Number of SMs of the product that this architecture is best known for."""
    max_shared_memory: int
    """Bytes of shared memory that one thread block may ask for."""
    has_tma: bool
    """Bulk tensor copies between global and shared memory."""
    has_wgmma: bool
    """Hopper's warp-group matrix instructions."""
    has_fp4_convert: bool
    """Conversions between float and e2m1 in one instruction."""
    has_tcgen05: bool
    """Blackwell's matrix instructions, with sums in tensor memory."""
    target: dict[str, str] = field(init=False)
    """What TileLang takes as an explicit compilation target."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", {"kind": "cuda", "arch": self.name})

    def shared_memory_each(self, blocks: int) -> int:
        """Bytes of shared memory for each of `blocks` thread blocks on an SM; the system takes 1 KiB more for each."""
        return (self.max_shared_memory + _KIB) // blocks - _KIB

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return arch_from_name, (self.name,)


_KIB = 1024
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # name, sm, num_sms, shared memory, TMA, wgmma, FP4, tcgen05
        Arch("sm_80", 80, 108, 163 * _KIB, False, False, False, False),  # A100
        Arch("sm_86", 86, 84, 99 * _KIB, False, False, False, False),  # A40
        Arch("sm_89", 89, 142, 99 * _KIB, False, False, False, False),  # L40S
        Arch("sm_90a", 90, 132, 227 * _KIB, True, True, False, False),  # H100, H200
        Arch("sm_100a", 100, 148, 227 * _KIB, True, False, True, True),  # B200
        Arch("sm_103a", 103, 148, 227 * _KIB, True, False, True, True),  # B300
        Arch("sm_120a", 120, 188, 99 * _KIB, True, False, True, False),  # RTX PRO 6000
    )
}
_BY_SM = {arch.sm: arch for arch in ARCHS.values()}

_compiling_for: Arch | None = None


def arch_from_name(name: str) -> Arch:
    """The architecture called `name`; sm_90 and sm_90a mean the same. Raises ValueError if there is none."""
    arch = ARCHS.get(name) or ARCHS.get(f"{name}a")
    if arch is None:
        raise ValueError(f"arch: expected one of {', '.join(ARCHS)}, got {name!r}")
    return arch


@contextmanager
def compiling_for(arch: Arch) -> Iterator[None]:
    """Within it, tensors on the meta device count as being on a GPU of this architecture."""
    global _compiling_for
    before, _compiling_for = _compiling_for, arch
    try:
        yield
    finally:
        _compiling_for = before


_known: dict[torch.device, Arch] = {}


def _arch_of_cuda_device(index: int) -> Arch:
    if name := env.get("TK_ARCH"):
        return arch_from_name(name)
    major, minor = torch.cuda.get_device_capability(index)
    arch = _BY_SM.get(10 * major + minor)
    if arch is None:
        raise UnsupportedArchError("tk-core", f"sm_{major}{minor} (cuda:{index})", f"one of {', '.join(ARCHS)}")
    return arch


def get_arch(device: torch.device | str | int | None = None) -> Arch:
    """Architecture of a CUDA device (the current one by default), or the one that TK_ARCH names.

    Raises UnsupportedArchError for a GPU that no kernel serves, ValueError for a device that is no GPU.
    """
    arch = _known.get(device)  # type: ignore[arg-type]
    if arch is not None:
        return arch
    if device is None or isinstance(device, (str, int)):
        device = torch.device("cuda" if device is None else device)
    if device.type == "cuda":
        if device.index is None:
            return get_arch(torch.device("cuda", torch.cuda.current_device()))
        _known[device] = _arch_of_cuda_device(device.index)
        return _known[device]
    if device.type == "meta" and _compiling_for is not None:
        return _compiling_for
    raise ValueError(f"device: expected a CUDA device, got {device}")
