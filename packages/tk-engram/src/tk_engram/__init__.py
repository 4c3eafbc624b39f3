"""Engram, a memory looked up by n-grams: hash, lookup, gate and convolution as GPU kernels. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
