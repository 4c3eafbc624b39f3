"""Named cases of per_channel_cast."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.per_channel.per_channel_cast import per_channel_cast
from tk_quant.testing.per_token import per_token_cast as by_token

Make = Callable[[str], dict[str, Any]]
MakeInput = Callable[[str], torch.Tensor]

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
HIDDENS = (576, 2048, 2560, 3072, 4096, 6144, 7168)


def normal(num_tokens: int, hidden: int, dtype: torch.dtype) -> MakeInput:
    """Normally distributed, each channel with a scale of its own, and each token with one of up to 16."""

    def build(device: str) -> torch.Tensor:
        x = torch.randn(num_tokens, hidden, device=device)
        x *= torch.exp2(torch.randint(-12, 12, (hidden,), device=device).to(torch.float32))
        x *= torch.exp2(torch.randint(-4, 1, (num_tokens, 1), device=device).to(torch.float32))
        return x.to(dtype)

    return build


def strided(num_tokens: int, hidden: int, dtype: torch.dtype, extra: int, first: int) -> MakeInput:
    """Rows with a gap of `extra` elements, which start at column `first` of a wider tensor."""
    wide = normal(num_tokens, hidden + extra, dtype)
    return lambda device: wide(device)[:, first : first + hidden]


def extremes(num_tokens: int, dtype: torch.dtype) -> MakeInput:
    """64 channels: zeros, infinity, NaN, subnormals, the largest values, ties, quotients at powers of two, random bits.

    24 of them are the tokens of `testing.per_token.per_token_cast.extremes`, as channels.
    """
    special = by_token.extremes(num_tokens, dtype)

    def build(device: str) -> torch.Tensor:
        x = torch.randn(num_tokens, 64)
        # Blocks whose amax is in one token: the first, the last, one in the middle of a thread's rows.
        x[0, 24], x[num_tokens - 1, 25], x[num_tokens // 2 + 3, 26] = 2.0**60, -(2.0**60), 2.0**60
        x[5, 27], x[num_tokens - 2, 28], x[num_tokens // 2 + 1, 29] = torch.nan, torch.inf, -torch.inf
        x[:, 30] = 3.0
        x[:, 31] = 0.5e-4
        x = x.to(dtype)
        x[:, :24] = special("cpu").t()
        return x.to(device)

    return build


def make(x: MakeInput, num_per_tokens: int = 128, round_sf: bool = False, **more: Any) -> Make:
    """Arguments of the op."""
    kwargs = {"fmt": "e4m3", "num_per_tokens": num_per_tokens, "round_sf": round_sf, **more}
    return lambda device: {"x": x(device), **kwargs}


def tiny_case(dtype: torch.dtype, num_per_tokens: int, round_sf: bool) -> Case:
    """A case with values around 1e-9 and the least sf_clamp_min."""
    name = f"{NAMES[dtype]}-{num_per_tokens}{'-round' if round_sf else ''}-h192-tiny"
    x, least = by_token.tiny(128, 192, dtype), by_token.LEAST_AMAX["e4m3"]
    return Case(name, make(x, num_per_tokens, round_sf, sf_clamp_min=least), small=True)


def case(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    num_per_tokens: int,
    round_sf: bool,
    suffix: str = "",
    **roles: Any,
) -> Case:
    """A case with normally distributed input."""
    name = f"{NAMES[dtype]}-{num_per_tokens}{'-round' if round_sf else ''}-h{hidden}-t{num_tokens}{suffix}"
    return Case(name, make(normal(num_tokens, hidden, dtype), num_per_tokens, round_sf), **roles)


SPEC = OpSpec(
    op=per_channel_cast,
    reference=reference.per_channel_cast,
    cases=(
        *(
            case(tokens, hidden, dtype, 128, round_sf, small=True, modes=tokens == 128 and not round_sf)
            for dtype in (BF16, FP32)
            for round_sf in (False, True)
            for tokens, hidden in ((128, 64), (256, 192), (0, 64))
        ),
        *(
            Case(
                f"{NAMES[dtype]}{'-round' if round_sf else ''}-extremes-t{tokens}",
                make(extremes(tokens, dtype), round_sf=round_sf),
                small=True,
            )
            for dtype in (BF16, FP32)
            for round_sf in (False, True)
            for tokens in (128, 256)
        ),
        tiny_case(BF16, 128, False),
        tiny_case(FP32, 128, True),
        *(
            Case(
                f"{NAMES[dtype]}-apart{extra}-from{first}",
                make(strided(128, 192, dtype, extra, first)),
                small=True,
                compile=True,
            )
            for dtype, extra, first in (
                (BF16, 64, 64),
                (BF16, 4, 4),
                (BF16, 6, 2),
                (BF16, 3, 1),
                (FP32, 2, 2),
                (FP32, 1, 1),
            )
        ),
        *(
            case(tokens, hidden, dtype, 128, round_sf, compile=hidden == 576)
            for tokens, dtype, round_sf in (
                (128, BF16, True),
                (3968, BF16, False),
                (8064, BF16, True),
                (4096, FP32, True),
            )
            for hidden in HIDDENS
        ),
        case(65536, 64, BF16, 128, False),
        case(8192, 7168, FP32, 128, False, "-bench", bench=True, gpu=False, model_shape=True, compile=True),
        *(
            case(*(8192, 7168, BF16, 128, round_sf, "-bench"), bench=True, gpu=False, model_shape=True, compile=True)
            for round_sf in (False, True)
        ),
        *(
            case(tokens, hidden, BF16, 128, False, "-bench", bench=True, gpu=False)
            for tokens, hidden in (
                *((8192, hidden) for hidden in HIDDENS[:-1]),
                *((tokens, 7168) for tokens in (128, 3968, 8064)),
            )
        ),
    ),
)
