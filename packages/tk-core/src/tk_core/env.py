"""The environment variables that the tk packages read; nothing else reads os.environ. See docs/environment.md.

Functions read a variable at every call, except those documented as "read once", which hot paths call.
"""

import os
from functools import cache

VARIABLES = {
    "TK_ARCH": "compile for this architecture (sm_80 … sm_120a) instead of the device's own",
    "TK_BACKEND": "`kernel` (default) or `reference`: what serves CUDA tensors; read once",
    "TK_COMMIT": "commit that benchmark results are recorded under where there is no git checkout",
    "TK_COMPILE": "`allow` (default) or `forbid`: whether a kernel that is not in the cache is compiled or an error",
    "TK_DEBUG": "1: check data before a launch (costs a synchronization), and raise where a gradient would be dropped",
    "TK_PRINT_KERNEL_SOURCE": "1: print the CUDA source of every kernel as it is loaded, and with a compiler's error",
    "CUDA_HOME": "CUDA toolkit to compile with; set here to the one installed from wheels if you have not set it",
    "CUDA_PATH": "the same, read if CUDA_HOME is not set",
    "CUDA_VISIBLE_DEVICES": "GPUs to use; each pytest-xdist worker begins with another one when there are several",
    "TILELANG_CACHE_DIR": "folder of the compiled kernels (default ~/.tilelang/cache)",
    "TILELANG_PRINT_ON_COMPILATION": "0 unless you set it: TileLang's message for each compilation",
}


def get(name: str, default: str | None = None) -> str | None:
    """Value of one of `VARIABLES`, or `default`; an empty value counts as unset."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in tk_core.env.VARIABLES")
    return os.environ.get(name) or default


def put(name: str, value: str) -> None:
    """Set one of `VARIABLES` for this process and its children."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in tk_core.env.VARIABLES")
    os.environ[name] = value


def set_default(name: str, value: str) -> None:
    """Set one of `VARIABLES` for this process and its children unless the user has."""
    if get(name) is None:
        put(name, value)


def flag(name: str) -> bool:
    """Whether one of `VARIABLES` is switched on: 1, true, yes or on, in any case."""
    return (get(name) or "").lower() in {"1", "true", "yes", "on"}


def tilelang_settings() -> list[tuple[str, str]]:
    """TileLang's own variables that are set and may change what it compiles."""
    others = {"TILELANG_CACHE_DIR", "TILELANG_PRINT_ON_COMPILATION"}
    return sorted(
        (name, value) for name, value in os.environ.items() if name.startswith("TILELANG_") and name not in others
    )


@cache
def debug() -> bool:
    """Whether TK_DEBUG asks for checks of the data; read once."""
    return flag("TK_DEBUG")


def compiling_is_forbidden() -> bool:
    """Whether TK_COMPILE=forbid. Raises ValueError on a value that is neither allow nor forbid."""
    value = get("TK_COMPILE", "allow")
    if value not in {"allow", "forbid"}:
        raise ValueError(f"TK_COMPILE: expected 'allow' or 'forbid', got {value!r}")
    return value == "forbid"


@cache
def default_backend() -> str:
    """TK_BACKEND, read once. Raises ValueError on a backend that does not exist."""
    name = get("TK_BACKEND", "kernel")
    if name not in {"kernel", "reference"}:
        raise ValueError(f"TK_BACKEND: expected 'kernel' or 'reference', got {name!r}")
    return name
