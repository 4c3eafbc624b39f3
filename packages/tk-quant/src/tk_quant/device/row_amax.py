"""The amax of rows that a warp has in registers, eight at a time."""

from typing import Any

from tk_core.headers import Header

_ROW_AMAX = Header(__file__)


def row_amax(magnitudes: Any, is_bf16: bool, group_lanes: int) -> Any:
    """The bits, int32, of the largest float32 of row lane % 8 among the 8 or 32 lanes of a group.

    `magnitudes` is the address of eight uint32, what the lane has of eight rows: float32, or pairs of bfloat16.
    """
    return _ROW_AMAX.call("int32", f"tk_row_amax<{str(is_bf16).lower()}, {group_lanes}>", magnitudes)
