"""Named cases of engram_lookup_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.lookup.engram_lookup_bwd import engram_lookup_bwd

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    num_columns: int,
    dim: int,
    num_rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sparse: bool = False,
    given: bool = False,
    negatives: bool = True,
    hot: float = 0.0,
    first_element: int = 0,
) -> Make:
    """Random indices, with `negatives` a third of them negative, and a share of `hot` all for one row.

    A gradient may be given; it and d_o start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = torch.Size(shape)
            storage = torch.empty(first_element + size.numel(), dtype=dtype, device=device).normal_()
            return storage[first_element:].view(size)

        shape = (num_tokens, num_columns)
        least = -(num_rows // 2) - 1 if negatives else 0
        indices = torch.randint(least, num_rows, shape, dtype=torch.int32, device=device)
        if hot:
            is_hot = torch.rand(shape, device=device) < hot
            indices = torch.where(is_hot, num_rows // 3, indices)
        return {
            "d_o": normal((*shape, dim), dtype),
            "indices": indices,
            "num_rows": num_rows,
            "grad": normal((num_rows, dim), torch.float32) if given else None,
            "sparse": sparse,
        }

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """d_o, the indices, and the written part of the gradient: all of a new one, otherwise the rows that are touched.

    Rows are counted as if no two pairs had the same one; those of a given gradient are read as well.
    """
    d_o, indices, grad = kwargs["d_o"], kwargs["indices"], kwargs["grad"]
    num_bytes = d_o.numel() * d_o.itemsize + indices.numel() * 4
    if kwargs["sparse"]:
        return num_bytes + 4 * (d_o.numel() + indices.numel())
    return num_bytes + (8 * d_o.numel() if grad is not None else 4 * kwargs["num_rows"] * d_o.shape[-1])


def _bench(name: str, *args: Any, model_shape: bool = False, compile: bool = False, **kwargs: Any) -> Case:
    made = make(*args, negatives=False, **kwargs)
    return Case(f"{name}-bench", made, bench=True, gpu=False, model_shape=model_shape, compile=compile)


_FLOAT32 = torch.float32

SPEC = OpSpec(
    op=engram_lookup_bwd,
    reference=reference.engram_lookup_bwd,
    mutates=("grad",),
    least_bytes=least_bytes,
    cases=(
        Case("d64-t5", make(5, 3, 64, 11), small=True, modes=True),
        Case("d32-t17-sparse", make(17, 3, 32, 9, sparse=True), small=True, modes=True),
        Case("d32-t70-given", make(70, 1, 32, 7, given=True), small=True, modes=True),
        Case("d96-t5-float32-given", make(5, 3, 96, 11, dtype=_FLOAT32, given=True), small=True, compile=True),
        Case("d288-t3-float32-sparse", make(3, 3, 288, 5, dtype=_FLOAT32, sparse=True), small=True),
        Case("d32-t67-one-row", make(67, 3, 32, 1, negatives=False), small=True),
        Case("d32-t67-one-row-sparse", make(67, 2, 32, 1, negatives=False, sparse=True), small=True),
        Case("d32-t64-hot-given", make(64, 5, 32, 40, hot=0.7, given=True), small=True),
        Case("d32-t9-unaligned", make(9, 3, 32, 5, given=True, first_element=1), small=True),
        Case("d64-t0", make(0, 3, 64, 5), small=True),
        Case("d64-t0-sparse", make(0, 3, 64, 5, sparse=True), small=True),
        Case("d64-c0-given", make(3, 0, 64, 5, given=True), small=True),
        *(Case(f"d256-t{t}", make(t, 16, 256, 30_011)) for t in (0, 1, 17, 4001)),
        *(Case(f"d256-t{t}-given", make(t, 16, 256, 30_011, given=True)) for t in (1, 8001)),
        *(Case(f"d256-t{t}-sparse", make(t, 16, 256, 30_011, sparse=True)) for t in (1, 17, 8001)),
        *(Case(f"d{dim}-t1001", make(1001, 8, dim, 1009)) for dim in (64, 160, 576, 1280)),
        Case("d352-t1001-float32-sparse", make(1001, 8, 352, 1009, dtype=_FLOAT32, sparse=True)),
        Case("d128-t1001-hot-given", make(1001, 8, 128, 1009, hot=0.5, given=True)),
        Case("d256-t1001-hot-sparse", make(1001, 8, 256, 1009, hot=0.5, sparse=True)),
        Case("d64-t1001-two-rows", make(1001, 3, 64, 2)),
        _bench("d256-t8192-sparse", 8192, 16, 256, 1 << 24, sparse=True, model_shape=True, compile=True),
        _bench("d256-t8192-given", 8192, 16, 256, 1 << 22, given=True, model_shape=True),
        _bench("d256-t8192-new", 8192, 16, 256, 1 << 18, model_shape=True, compile=True),
        _bench("d256-t8192-hot-sparse", 8192, 16, 256, 1 << 24, sparse=True, hot=0.0625),
        _bench("d64-t8192-sparse", 8192, 16, 64, 1 << 24, sparse=True),
        *(_bench(f"d256-t{t}-sparse", t, 16, 256, 1 << 22, sparse=True) for t in (1, 64, 4001, 8001)),
    ),
)
