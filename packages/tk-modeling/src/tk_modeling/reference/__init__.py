"""The modules of tk_modeling in plain PyTorch: the same parameters and state_dict, any floating-point dtype."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
