"""Alignment of groups in the contiguous layouts, under DeepGEMM's names: 128, the rows of the highest tiles."""

from tk_core import check

ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    """128: each group begins at a multiple of this, in rows (M) or, in the K-grouped products, along K."""
    return ALIGNMENT


def set_mk_alignment_for_contiguous_layout(new_alignment: int) -> None:
    """Accept 128, for DeepGEMM's callers. Raises TypeError for anything but an int, ValueError for other alignments."""
    check.integer("new_alignment", new_alignment)
    check.require(new_alignment == ALIGNMENT, "new_alignment", f"{ALIGNMENT}, the only one", new_alignment)
