"""The amax of rows whose values a warp holds in registers, eight rows at a time."""

from typing import Any

from tk_core.headers import Header

_ROW_AMAX = Header(__file__)


def row_amax(magnitudes: Any, is_bf16: bool, group_lanes: int) -> Any:
    """The amax of row lane % 8 over the 8 or 32 lanes of a group, as the bits of a float32, int32.

    `magnitudes` is the address of eight uint32, the lane's magnitudes of eight rows: each a float32 or two bfloat16.
    """
    return _ROW_AMAX.call("int32", f"tk_row_amax<{str(is_bf16).lower()}, {group_lanes}>", magnitudes)
