"""Named cases of per_token_cast_back."""

from collections.abc import Callable
from typing import Any

from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.dequantize.per_token_cast_back import per_token_cast_back
from tk_quant.testing.dequantize.cast_back import NEIGHBOURS, SIZES, MakePair, every_code, more, pair


def make(x: MakePair, fmt: str, num_per_channels: int, others: Any = None) -> Callable[[str], dict[str, Any]]:
    """Arguments of per_token_cast_back; `others(device)` gives more of them."""
    return lambda device: {
        "x": x(device),
        "fmt": fmt,
        "num_per_channels": num_per_channels,
        **(others(device) if others is not None else {}),
    }


def _case(
    fmt: str, group: int, layout: str, out: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    return Case(
        f"{fmt}-{group}-{layout}-{out}-h{hidden}-t{num_tokens}{suffix}",
        make(pair(num_tokens, hidden, fmt, (1, group), layout), out, group, more(fmt, layout)),
        **roles,
    )


SPEC = OpSpec(
    op=per_token_cast_back,
    reference=reference.per_token_cast_back,
    cases=(
        *(
            _case(
                fmt,
                group,
                layout,
                out,
                5,
                576,
                small=True,
                modes=(fmt, group, layout, out) in (("e4m3", 128, "row", "bf16"), ("e2m1", 32, "packed", "fp32")),
            )
            for fmt in ("e4m3", "e2m1")
            for out in ("bf16", "fp32")
            for group, layout in (
                (16, "row"),
                (32, "packed"),
                (64, "col"),
                (128, "row"),
                (128, "packed"),
                (576, "row"),
                (576, "packed"),
            )
        ),
        *(
            _case(fmt, group, layout, out, 5, 576, small=True, modes=(layout, out) == ("nvswizzled", "fp32"))
            for fmt, group, layout, out in (
                ("e5m6", 576, "row", "fp32"),
                ("e5m6", 128, "packed", "bf16"),
                ("e2m1", 16, "nv", "bf16"),
                ("e2m1", 16, "nvswizzled", "fp32"),
                ("e2m1", 32, "swizzled", "bf16"),
            )
        ),
        _case("e4m3", 128, "row", "bf16", 7, 64, small=True),
        _case("e4m3", 128, "packed", "fp32", 0, 192, small=True),
        Case(
            "e4m3-32-row-bf16-h192-t9-apart3",
            make(pair(9, 192, "e4m3", (1, 32), "row", 3, 1), "bf16", 32),
            small=True,
        ),
        Case("e4m3-256-row-fp32-every-code", make(every_code("e4m3", "row"), "fp32", 256), small=True),
        Case("e2m1-512-packed-bf16-every-code", make(every_code("e2m1", "packed"), "bf16", 512)),
        *(
            _case(fmt, group, layout, out, tokens, hidden)
            for fmt, group, layout, out in (
                ("e4m3", 128, "row", "fp32"),
                ("e4m3", 128, "packed", "bf16"),
                ("e2m1", 32, "row", "bf16"),
                ("e2m1", 32, "packed", "fp32"),
            )
            for tokens, hidden in SIZES
        ),
        *(_case("e4m3", 128, "row", "bf16", 4001, hidden) for hidden in (2560, 3072, 6144)),
        _case("e2m1", 16, "nv", "bf16", 4001, 7168),
        _case("e2m1", 16, "nvswizzled", "bf16", 8001, 2048),
        _case("e5m6", 7168, "row", "fp32", 4001, 7168),
        *(
            _case(fmt, group, layout, out, 8192, 7168, "-bench", bench=True, gpu=False, compile=True, model_shape=True)
            for fmt, group, layout in (("e4m3", 128, "row"), ("e2m1", 32, "row"))
            for out in ("bf16", "fp32")
        ),
        *(
            _case(fmt, group, "packed", out, 8192, 7168, "-bench", bench=True, gpu=False, compile=True)
            for fmt, group in (("e4m3", 128), ("e2m1", 32))
            for out in ("bf16", "fp32")
        ),
        _case("e4m3", 7168, "row", "bf16", 8192, 7168, "-bench", bench=True, gpu=False),
        *(
            _case("e2m1", 16, layout, "bf16", 8192, 7168, "-bench", bench=True, gpu=False, compile=True)
            for layout in ("nv", "nvswizzled")
        ),
        _case("e5m6", 7168, "row", "fp32", 8192, 7168, "-bench", bench=True, gpu=False, compile=True),
        *(
            _case(fmt, group, "row", out, tokens, hidden, "-bench", bench=True, gpu=False)
            for fmt, group, out in (("e4m3", 128, "bf16"), ("e4m3", 128, "fp32"), ("e2m1", 32, "bf16"))
            for tokens, hidden in NEIGHBOURS
        ),
    ),
)
