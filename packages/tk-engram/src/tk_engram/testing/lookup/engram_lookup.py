"""Named cases of engram_lookup."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.lookup.engram_lookup import engram_lookup

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    num_columns: int,
    dim: int,
    num_rows: int,
    *,
    kind: str = "bf16",
    first_element: int = 0,
    row_gap: int = 0,
    negatives: bool = True,
    out: bool = False,
    host: bool = False,
) -> Make:
    """Random indices, with `negatives` about a third of them negative, and a table of `kind`.

    "bf16"; "ue8m0" and "float": e4m3 with scales in a tensor of their own; "packed": e4m3 with the exponents of a row
    after its codes, as in DeepSeek's V4.1. Any code and exponent may come. Rows of bf16 and codes have `row_gap`
    elements between them, the first begins at element `first_element` of its storage. `host` tables of a GPU are in
    pinned memory.
    """

    def build(device: str) -> dict[str, Any]:
        pin = host and torch.device(device).type == "cuda"
        table_device = "cpu" if pin else device

        def rows(width: int, dtype: torch.dtype, *, first: int = 0, gap: int = 0) -> torch.Tensor:
            size = first + num_rows * (width + gap)
            storage = torch.empty(size, dtype=dtype, device=table_device, pin_memory=pin)
            if dtype is torch.uint8:
                storage.random_(0, 256)
            else:
                storage.normal_()
            return storage[first:].view(num_rows, width + gap)[:, :width]

        groups, table_sf = dim // 32, None
        if kind == "bf16":
            table = rows(dim, torch.bfloat16, first=first_element, gap=row_gap)
        elif kind == "packed":
            both = rows(dim + groups, torch.uint8, first=first_element, gap=row_gap)
            table, table_sf = both[:, :dim].view(torch.float8_e4m3fn), both[:, dim:]
        else:
            table = rows(dim, torch.uint8, first=first_element, gap=row_gap).view(torch.float8_e4m3fn)
            table_sf = rows(groups, torch.uint8 if kind == "ue8m0" else torch.float32)
        least = -(num_rows // 2) - 1 if negatives else 0
        shape = (num_tokens, num_columns)
        indices = torch.randint(least, num_rows, shape, dtype=torch.int32, device=device)
        written = None
        if out:
            written = torch.full((*shape, dim), torch.nan, dtype=torch.bfloat16, device=device)
        return {"indices": indices, "table": table, "table_sf": table_sf, "out": written}

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the indices, of each row that is looked up, and of the result."""
    indices, table, table_sf = kwargs["indices"], kwargs["table"], kwargs["table_sf"]
    row = table.shape[1] * table.itemsize + (0 if table_sf is None else table_sf.shape[1] * table_sf.itemsize)
    return 4 * indices.numel() + indices.numel() * (row + 2 * table.shape[1])


def _bench(name: str, *args: Any, model_shape: bool = False, compile: bool = False, **kwargs: Any) -> Case:
    made = make(*args, negatives=False, **kwargs)
    return Case(f"{name}-bench", made, bench=True, gpu=False, model_shape=model_shape, compile=compile)


# 8.6 and 8.9 GB.
_BF16_ROWS, _PACKED_ROWS = 1 << 24, 1 << 25

SPEC = OpSpec(
    op=engram_lookup,
    reference=reference.engram_lookup,
    mutates=("out",),
    least_bytes=least_bytes,
    cases=(
        Case("bf16-d64-t3", make(3, 5, 64, 11), small=True, modes=True),
        Case("bf16-d32-t17-out", make(17, 3, 32, 9, out=True), small=True, modes=True),
        Case("bf16-d96-t5-strided", make(5, 7, 96, 9, row_gap=8), small=True),
        Case("bf16-d96-t5-aligned-to-4", make(5, 7, 96, 9, row_gap=2), small=True),
        Case("bf16-d64-t5-unaligned", make(5, 7, 64, 9, first_element=1), small=True),
        Case("bf16-d288-t3", make(3, 5, 288, 9), small=True),
        Case("bf16-d64-t0", make(0, 4, 64, 9), small=True),
        Case("bf16-d64-c0-out", make(4, 0, 64, 9, out=True), small=True),
        Case("ue8m0-d64-t17", make(17, 3, 64, 9, kind="ue8m0"), small=True),
        Case("ue8m0-d32-t3", make(3, 3, 32, 9, kind="ue8m0"), small=True),
        Case("float-d96-t5", make(5, 7, 96, 9, kind="float"), small=True),
        Case("float-d96-t5-aligned-to-2", make(5, 7, 96, 9, kind="float", row_gap=2), small=True, compile=True),
        Case("packed-d256-t3", make(3, 2, 256, 9, kind="packed"), small=True),
        Case("packed-d64-t3-unaligned", make(3, 5, 64, 9, kind="packed", first_element=1), small=True),
        *(Case(f"bf16-d256-t{t}", make(t, 16, 256, 100_003)) for t in (0, 1, 17, 4001, 8001)),
        *(Case(f"packed-d256-t{t}-out", make(t, 16, 256, 100_003, kind="packed", out=True)) for t in (1, 4001)),
        *(Case(f"bf16-d{dim}-t1001", make(1001, 8, dim, 1009)) for dim in (64, 160, 576, 1280, 4096)),
        *(Case(f"float-d{dim}-t1001", make(1001, 8, dim, 1009, kind="float")) for dim in (64, 352, 1280)),
        Case("ue8m0-d512-t1001-strided", make(1001, 8, 512, 1009, kind="ue8m0", row_gap=4)),
        _bench("bf16-d256-t8192", 8192, 16, 256, _BF16_ROWS, model_shape=True, compile=True),
        _bench("packed-d256-t8192", 8192, 16, 256, _PACKED_ROWS, kind="packed", model_shape=True, compile=True),
        _bench("float-d256-t8192", 8192, 16, 256, _PACKED_ROWS, kind="float"),
        _bench("bf16-d64-t8192", 8192, 16, 64, _BF16_ROWS),
        _bench("bf16-d1280-t8192", 8192, 16, 1280, 1 << 22),
        *(_bench(f"bf16-d256-t{t}", t, 16, 256, 1 << 22) for t in (1, 64, 4001, 8001)),
    ),
)
