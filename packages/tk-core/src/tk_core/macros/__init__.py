"""Macros that kernels of several packages need. They import TileLang, so only kernels' builders import them."""
