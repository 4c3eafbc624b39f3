"""Experts on several GPUs: dispatch of tokens to the ranks of their experts, and combine. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
