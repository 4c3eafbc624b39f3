"""The lightning indexer of sparse attention as GPU kernels. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
