"""Manifold-constrained hyper-connections (mHC) as GPU kernels. Names load on first use.

Source of all ops: "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880.
"""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
