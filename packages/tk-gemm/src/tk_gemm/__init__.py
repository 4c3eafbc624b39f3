"""FP8 matrix products with block scales, and BF16 ones, dense and grouped by expert. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
