"""Plain PyTorch references: same names and signatures as the ops, on any device."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
