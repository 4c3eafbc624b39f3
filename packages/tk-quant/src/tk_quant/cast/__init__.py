"""Casts to and from e4m3, e2m1 and e5m6 with scale factors of blocks, and to other dtypes without."""

# The op and this folder share a name: tk_quant.cast is the op.
from tk_quant.cast.to_dtype import cast as cast
