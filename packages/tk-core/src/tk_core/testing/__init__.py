"""Named cases of ops, and functions that compare their outputs. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
