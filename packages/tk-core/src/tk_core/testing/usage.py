"""What a kernel takes of a multiprocessor: registers, local and shared memory."""

from typing import Any

from tk_core import compat
from tk_core.kernel import Kernel


def resource_usage(kernel: Kernel, *args: Any) -> dict[str, compat.ResourceUsage]:
    """Compile for these arguments and the device alone, and say what each function of the kernel takes, by name."""
    return compat.resource_usage(kernel.build(*args), args[-1], kernel._pass_configs, kernel._compile_flags)
