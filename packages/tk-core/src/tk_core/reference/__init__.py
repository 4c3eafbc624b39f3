"""What the references of the packages share: plain PyTorch, for any device."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
