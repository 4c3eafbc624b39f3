"""e5m6, a float16 with four fewer bits of mantissa: casts from float32."""

from typing import Any

from tk_core.headers import Header

_E5M6 = Header(__file__)


def encode_e5m6x8(values: Any, words: Any) -> Any:
    """Encode eight float32 at the address `values`, and store the codes in three uint32 at the address `words`.

    Magnitudes must be below 65280, as they are if the scale was made from the amax of the block.
    """
    return _E5M6.call("void", "tk_encode_e5m6x8", values, words)
