"""Stochastic rounding: a value goes to the neighbour farther from zero with the probability of its place between both.

The random bits are a hash of four neighbouring values, a quad, of its index and of a seed, so a call can be repeated.
With W the hash's 32 bits, and `rev` the reversal of 16 bits, an element of a quad has the 16 random bits

    bfloat16   W₀[15:0], W₀[31:16], W₁[15:0], W₁[31:16]
    e4m3       W[15:0], rev W[15:0], W[31:16], rev W[31:16]
    e2m1       as e4m3, of W's bytes in the order 0, 2, 1, 3

and goes away from zero if its place, from 0 to 1, and these bits as a fraction add up to 1 or more. This is what the
instructions of sm_100 do (cvt.rs); hash and bits are those of DeepSeek's TileKernels 2.1.0. `reference.stochastic` has
the hash in full. Kernels import this module in their builder, as it imports TileLang.
"""

import tilelang.language as T

from tk_core.device.bits import byte_perm, reverse_bits
from tk_core.macros.quantize import INFINITY_BITS, MAGNITUDE_BITS

_MULTIPLIERS = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
_WORD_MULTIPLIERS = (0x846CA68B, 0xD35A2D97)
# By format: the bias of exponents, and the bits of a mantissa.
_BIAS = {"e4m3": 7, "e2m1": 1}
_MANTISSA_BITS = {"e4m3": 3, "e2m1": 1}
_NAN_CODE = {"e4m3": 0x7F, "e2m1": 0x7}
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}


@T.macro
def _mixed(h: T.uint32) -> T.uint32:
    """murmur3's 32-bit finalizer."""
    mixed = T.alloc_var("uint32")
    mixed = (h ^ (h >> T.uint32(16))) * T.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> T.uint32(13))) * T.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> T.uint32(16))


@T.macro
def hash_of_seed(seed: T.int64) -> T.uint32:
    """What a seed adds to the hash of each quad; 0 for the seed 0."""
    low, high = T.cast(seed, "uint32"), T.cast(seed >> T.int64(32), "uint32")
    return _mixed(_mixed(low) + high)


@T.macro
def hash_of_quad(values: T.Buffer, index: T.uint32, of_seed: T.uint32, words: T.Buffer) -> None:
    """words, uint32 (1,) or (2,): the random bits of the quad `values`, float32 (4,)."""
    h = T.alloc_var("uint32")
    h = index + of_seed
    for k, factor in enumerate(_MULTIPLIERS):
        h = h + T.reinterpret(values[k], "uint32") * T.uint32(factor)
    h = (h ^ (h >> T.uint32(23))) * T.uint32(0x7FEB352D)
    h = h ^ (h >> T.uint32(16))
    for k, factor in enumerate(_WORD_MULTIPLIERS[: int(words.shape[0])]):
        words[k] = h * T.uint32(factor)
        words[k] = words[k] ^ (words[k] >> T.uint32(11))


@T.macro
def bf16_of_quad(values: T.Buffer, random: T.Buffer, words: T.Buffer) -> None:
    """words, uint32 (2,): the quad `values` as bfloat16, two in a word, by the random bits of `hash_of_quad`."""
    for k in (0, 1):
        codes = T.alloc_local((2,), "uint32")
        for side in (0, 1):
            bits = T.reinterpret(values[2 * k + side], "int32")
            magnitude = bits & MAGNITUDE_BITS
            part = T.cast(random[k] >> T.uint32(16) if side else random[k] & T.uint32(0xFFFF), "int32")
            # A finite value above the largest bfloat16 does not become infinite.
            moved = T.min(magnitude + part, INFINITY_BITS - 1)
            code = T.if_then_else(magnitude < INFINITY_BITS, moved, magnitude) >> 16
            signed = code | (bits >> 16 & 0x8000)
            codes[side] = T.cast(T.if_then_else(magnitude > INFINITY_BITS, 0x7FFF, signed), "uint32")
        words[k] = codes[0] | codes[1] << T.uint32(16)


@T.macro
def codes_of_quad(values: T.Buffer, random: T.uint32, fmt: str) -> T.uint32:
    """The quad `values` as e4m3 codes, or e2m1 codes in the low half of a word, by a word of `hash_of_quad`."""
    ordered, packed, signs = T.alloc_var("uint32"), T.alloc_var("uint32"), T.alloc_var("uint32")
    ordered = byte_perm(random, random, 0x3120) if fmt == "e2m1" else random
    backwards = reverse_bits(ordered)
    # An element's random bits, in bits 8 to 23.
    of_element = (
        byte_perm(ordered, T.uint32(0), 0x4104),
        byte_perm(backwards, T.uint32(0), 0x4324),
        byte_perm(ordered, T.uint32(0), 0x4324),
        byte_perm(backwards, T.uint32(0), 0x4104),
    )
    sums, bits = T.alloc_local((4,), "uint32"), T.alloc_local((4,), "uint32")
    for k in (0, 1, 2, 3):
        bits[k] = T.reinterpret(values[k], "uint32")
        bounded = T.min(T.abs(values[k]), T.float32(_LARGEST[fmt]))
        # A float32 with the format's bias: its subnormals are where the format's are. Its code goes to the top byte,
        # and the place between two codes below.
        moved = T.reinterpret(T.ieee_mul(bounded, T.float32(2.0 ** (_BIAS[fmt] - 127)), "rz"), "uint32")
        sums[k] = moved * T.uint32(2 ** (_MANTISSA_BITS[fmt] + 1)) + of_element[k]
    packed = byte_perm(byte_perm(sums[0], sums[1], 0x73), byte_perm(sums[2], sums[3], 0x73), 0x5410)
    signs = byte_perm(byte_perm(bits[0], bits[1], 0x73), byte_perm(bits[2], bits[3], 0x73), 0x5410)
    packed = packed | signs & T.uint32(0x80808080)
    total = T.abs(values[0]) + T.abs(values[1]) + T.abs(values[2]) + T.abs(values[3])
    if T.isnan(total):
        for k in (0, 1, 2, 3):
            if T.isnan(values[k]):
                packed = packed & ~T.uint32(0xFF << 8 * k) | T.uint32(_NAN_CODE[fmt] << 8 * k)
    if fmt == "e2m1":
        # Signs beside their codes, and two codes in a byte.
        packed = packed & T.uint32(0x07070707) | packed >> T.uint32(4) & T.uint32(0x08080808)
        packed = byte_perm(packed | packed >> T.uint32(4), T.uint32(0), 0x4420)
    return packed
