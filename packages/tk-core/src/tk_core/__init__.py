"""What the tk packages share: compilation, op registration, checks, architectures, testing. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
