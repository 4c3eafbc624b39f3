"""The tiles of the products' kernels on Blackwell."""

BLOCK = 128
"""Rows of a tile, and columns that have sums of their own in tensor memory."""
PIECE = 32
"""Columns that a storing thread has in registers at a time."""
THREADS = 256
"""Four warps, of which those that load and multiply are the first, and four that store: a thread has a row."""
