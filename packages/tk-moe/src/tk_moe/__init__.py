"""Mixture-of-experts routing, token maps, expand and reduce as GPU kernels. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
