"""e4m3 codes and ue8m0 exponents: to wider types."""

from typing import Any

from tk_core.headers import Header

_FP8 = Header(__file__)


def decode_e4m3x4_f16(codes: Any, pairs: Any) -> Any:
    """Store the values of a uint32's four e4m3 codes as float16, at the address of two uint32."""
    return _FP8.call("void", "tk_decode_e4m3x4_f16", codes, pairs)


def decode_ue8m0(word: Any, index: Any) -> Any:
    """2**(byte - 127) as a float32, for byte `index` of a uint32; 255 is NaN."""
    return _FP8.call("float32", "tk_decode_ue8m0", word, index)
