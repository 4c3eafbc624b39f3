"""SiLU, l / (1 + exp(-l)), with the bits of CUDA's accurate expf and of IEEE division, and clamps of several elements.

nvcc compiles a division to 8 instructions and a branch to the special cases, which keeps it from interleaving several
divisions. For a bfloat16 l within ±87 four instructions without a branch are enough. Then d = 1 + exp(-l) is a normal
float32, and

    r = 1 / d, approximately;  q = l * r;  out = q - (d * q - l) * r          both differences fused

is l / d correctly rounded: tests/device/test_swiglu.py checks all such l, with exp and r also one unit in the last
place off. The sole exception is d = 2 - 2**-23, where r has to be the float32 nearest to 1 / d. nvcc's own division
needs that as well, and the gpu tier compares all bfloat16 values. The inner bracket is d * q - l and not l - d * q, so
that l = -0 gives -0.

`words`, `gates` and `values` are addresses of uint32, each a pair of bfloat16.
"""

from typing import Any

from tk_core.device.bits import byte_perm
from tk_core.headers import Header

_SWIGLU = Header(__file__)

NEAR_LIMIT = 0x42AE
"""The bits of 87 as bfloat16."""


def _near_limits() -> Any:
    """NEAR_LIMIT in both halves."""
    import tilelang.language as T

    return T.uint32(NEAR_LIMIT * 0x10001)


def _clamp_limits(clamp: Any) -> Any:
    """`clamp` rounded down to bfloat16, in both halves: the same bfloat16 are above it."""
    import tilelang.language as T

    return byte_perm(T.reinterpret(clamp, "uint32"), T.uint32(0), 0x3232)


def silu(x: Any, is_near: bool = False) -> Any:
    """SiLU of a float32; `is_near`: x is a bfloat16 that is known to be within ±87, or NaN."""
    return _SWIGLU.call("float32", "tk_silu_near" if is_near else "tk_silu", x)


def are_near(words: Any, num_words: int) -> Any:
    """Whether `silu` may take all elements for near."""
    return _SWIGLU.call("bool", f"tk_are_within<0, {num_words}>", words, words, _near_limits())


def are_within_clamp(gates: Any, values: Any, num_words: int, clamp: Any) -> Any:
    """Whether no gate is above the float32 `clamp`, and no value's magnitude; NaN passes."""
    return _SWIGLU.call("bool", f"tk_are_within<{num_words}, {num_words}>", gates, values, _clamp_limits(clamp))


def count_clamped(gates: Any, values: Any, num_words: int, clamp: Any, count: Any) -> Any:
    """Add the numbers of gates > clamp, values > clamp and values < -clamp at the address of three int32.

    There are at most 16 words of gates and of values.
    """
    return _SWIGLU.call("void", f"tk_count_beyond<{num_words}>", gates, values, _clamp_limits(clamp), count)


def clamp_value(x: Any, least: Any, most: Any) -> Any:
    """float32 x, at least `least` and at most `most`; NaN stays NaN."""
    return _SWIGLU.call("float32", "tk_clamp", x, least, most)
