"""Named cases of reduce_fused."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.reduce.reduce_fused import reduce_fused
from tk_moe.testing.expand.expand_to_fused import make_maps, model_rows, name_of, random_bits

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    weights: bool = True,
    row_sf: bool = False,
    fp8_format: str = "",
    out_sf: float | None = None,
    num_rows: int | None = None,
    values: str = "normal",
    first_element: int = 0,
    **routing: Any,
) -> Make:
    """Inputs of reduce_fused. Values: "normal", "bits" (every bit random), "ties".

    With "ties" many sums are 2**-54 off the midpoint of two float32, where rounding to float64 first gives a wrong
    result: 1 plus 65 / 64 times 16519105 * 2**-48, which is 2**-24 * (1 + 2**-30).
    """

    def build(device: str) -> dict[str, Any]:
        rows = model_rows(num_tokens, num_topk) if num_rows is None else num_rows

        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if values == "bits":
                return random_bits(shape, dtype, device)
            return torch.randn(shape, dtype=dtype, device=device)

        token_topk_to_pos, _ = make_maps(num_tokens, num_topk, rows, device, **routing)
        x = draw((first_element + rows * hidden,), dtype)[first_element:].view(rows, hidden)
        topk_weights = draw((num_tokens, num_topk), torch.float32)
        if values == "ties":
            x = torch.where(x > 0, 1, 65 / 64).to(dtype) * torch.where(x.abs() > 1.5, -1, 1).to(dtype)
            topk_weights = torch.where(topk_weights > 0, 1, 16519105 * 2.0**-48)
        inputs = {
            "x": (x, draw((rows,), torch.float32)) if row_sf else x,
            "topk_weights": topk_weights if weights else None,
            "token_topk_to_pos": token_topk_to_pos,
            "fp8_format": fp8_format,
            "out": None,
        }
        if out_sf is not None:
            inputs["sf"] = torch.full((1,), out_sf, device=device)
        return inputs

    return build


def make_with_out(make_inputs: Make, first_element: int = 0) -> Make:
    """`make_inputs` with an `out` to write into, which starts at element `first_element` of its storage."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_inputs(device)
        x = inputs["x"][0] if isinstance(inputs["x"], tuple) else inputs["x"]
        shape = (inputs["token_topk_to_pos"].shape[0], x.shape[1])
        dtype = torch.float8_e4m3fn if inputs["fp8_format"] else x.dtype
        storage = torch.empty((first_element + shape[0] * shape[1],), dtype=dtype, device=device)
        return {**inputs, "out": storage[first_element:].view(shape)}

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the rows that have a token, of the maps and of the output: rows of padding need not be read."""
    x, row_sf = inputs["x"] if isinstance(inputs["x"], tuple) else (inputs["x"], None)
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    num_used = int((inputs["token_topk_to_pos"] >= 0).sum())
    total = num_used * (x.shape[1] * x.element_size() + (4 if row_sf is not None else 0))
    for tensor in (inputs["topk_weights"], inputs["token_topk_to_pos"], inputs.get("sf"), out):
        total += tensor.numel() * tensor.element_size() if tensor is not None else 0
    return total


_SMALL_ROUTING = {"num_rows": 40, "num_experts": 4, "alignment": 4, "share_without_position": 0.2}
_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=reduce_fused,
    reference=reference.reduce_fused,
    least_bytes=least_bytes,
    mutates=("out",),
    cases=(
        Case("bf16-h64-t7", make(7, 64, 3, **_SMALL_ROUTING), small=True, modes=True, compile=True),
        Case("float32-h64-t7", make(7, 64, 3, _FLOAT32, **_SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h192-t7-no-weights", make(7, 192, 3, weights=False, **_SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h192-t7-row-sf", make(7, 192, 3, row_sf=True, **_SMALL_ROUTING), small=True, compile=True),
        Case("float32-h192-t7-row-sf-alone", make(7, 192, 3, _FLOAT32, weights=False, row_sf=True, **_SMALL_ROUTING)),
        Case(
            "bf16-h192-t7-e4m3",
            make(7, 192, 3, row_sf=True, fp8_format="e4m3", out_sf=37.3, **_SMALL_ROUTING),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("bf16-h192-t7-e4m3-no-sf", make(7, 192, 3, fp8_format="e4m3", **_SMALL_ROUTING), small=True),
        Case(
            "float32-h192-t7-e4m3",
            make(7, 192, 3, _FLOAT32, fp8_format="e4m3", out_sf=-1e3, **_SMALL_ROUTING),
            small=True,
        ),
        Case("bf16-h64-t7-out", make_with_out(make(7, 64, 3, **_SMALL_ROUTING)), small=True, modes=True),
        Case("bf16-h64-t7-e4m3-out", make_with_out(make(7, 64, 3, fp8_format="e4m3", **_SMALL_ROUTING)), small=True),
        # Tensors that are not aligned to 16 bytes are copied to aligned ones.
        Case("bf16-h64-t7-unaligned", make(7, 64, 3, first_element=1, **_SMALL_ROUTING), small=True),
        Case("float32-h64-t7-unaligned-out", make_with_out(make(7, 64, 3, _FLOAT32, **_SMALL_ROUTING), 3), small=True),
        Case(
            "bf16-h64-t7-e4m3-unaligned-out",
            make_with_out(make(7, 64, 3, fp8_format="e4m3", values="bits", **_SMALL_ROUTING), 1),
            small=True,
            compile=True,
        ),
        # No tokens, no rows, no positions, positions past the last row, all rows of one expert.
        Case("bf16-h64-t0", make(0, 64, 3, **_SMALL_ROUTING), small=True),
        Case("bf16-h64-t7-no-rows", make(7, 64, 3, **{**_SMALL_ROUTING, "num_rows": 0}), small=True),
        Case(
            "bf16-h64-t40-past-the-end",
            make(40, 64, 3, drop_what_does_not_fit=False, **{**_SMALL_ROUTING, "num_rows": 30}),
            small=True,
        ),
        Case("bf16-h576-t67-no-position", make(67, 576, 4, num_rows=256, share_without_position=1.0)),
        Case("bf16-h576-t67-one-expert", make(67, 576, 4, num_rows=300, num_experts=1)),
        # NaN, infinities, subnormals, largest values; sums whose exact value is near the midpoint of two floats.
        Case("bf16-h576-t300-bits", make(300, 576, 3, values="bits", row_sf=True)),
        Case("float32-h576-t300-bits", make(300, 576, 3, _FLOAT32, values="bits")),
        Case("float32-h576-t300-e4m3-bits", make(300, 576, 3, _FLOAT32, values="bits", fp8_format="e4m3", out_sf=1.0)),
        Case("float32-h576-t300-ties", make(300, 576, 9, _FLOAT32, values="ties")),
        *(
            Case(f"{name_of(dtype)}-h576-t131-k{k}", make(131, 576, k, dtype, share_without_position=0.1))
            for dtype in (_BF16, _FLOAT32)
            for k in (1, 2, 3, 4, 5, 7)
            if dtype == _BF16 or k == 3
        ),
        Case("bf16-h576-t131-k32", make(131, 576, 32), compile=True),
        *(
            Case(f"bf16-h{hidden}-t{num_tokens}", make(num_tokens, hidden, num_topk))
            for hidden, num_topk in ((576, 9), (2048, 8), (4096, 6), (7168, 8))
            for num_tokens in (0, 1, 263, 264, 4001, 8001)
        ),
        Case("float32-h7168-t4001", make(4001, 7168, 4, _FLOAT32)),
        Case("bf16-h7168-t4001-e4m3", make(4001, 7168, 8, row_sf=True, fp8_format="e4m3", out_sf=11.0)),
        Case("bf16-h2560-t4001", make(4001, 2560, 8)),
        Case("bf16-h7168-t4096-bench", make(4096, 7168, 8), bench=True, model_shape=True, gpu=False, compile=True),
        Case("float32-h7168-t4096-bench", make(4096, 7168, 8, _FLOAT32), bench=True, gpu=False),
        Case("bf16-h7168-t4096-e4m3-bench", make(4096, 7168, 8, fp8_format="e4m3", out_sf=9.0), bench=True, gpu=False),
        *(
            Case(f"bf16-h{hidden}-t4096-bench", make(4096, hidden, 8), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 3072, 4096, 6144)
        ),
        *(
            Case(f"bf16-h7168-t{num_tokens}-bench", make(num_tokens, 7168, 8), bench=True, gpu=False)
            for num_tokens in (1, 64, 4001, 8001)
        ),
    ),
)
