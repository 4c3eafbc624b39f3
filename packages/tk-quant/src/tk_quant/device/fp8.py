"""e4m3 codes and ue8m0 exponents: to wider types, and from bfloat16 and float32 to one byte each."""

from typing import Any

from tk_core.headers import Header

_FP8 = Header(__file__)


def decode_e4m3x4_f16(codes: Any, pairs: Any) -> Any:
    """Store the values of a uint32's four e4m3 codes as float16, at the address of two uint32."""
    return _FP8.call("void", "tk_decode_e4m3x4_f16", codes, pairs)


def decode_ue8m0(word: Any, index: Any) -> Any:
    """2**(byte - 127) as a float32, for byte `index` of a uint32; 255 is NaN."""
    return _FP8.call("float32", "tk_decode_ue8m0", word, index)


def store_exponent(word: Any, index: Any, sf_bits: Any) -> Any:
    """Store the exponent of a float32 power of two, given as its bits, to one byte of an int32 at an address."""
    return _FP8.call("void", "tk_store_exponent", word, index, sf_bits)


def cast_elements_bf16x8(x: Any, codes: Any, exponents: Any, stride: int) -> Any:
    """Cast eight bfloat16 at an address to e4m3, each with its own power of two as sf.

    Stores two uint32 of codes at `codes`, two of biased exponents at `exponents`, `stride` apart.
    """
    return _FP8.call("void", "tk_cast_elements_bf16x8", x, codes, exponents, stride)
