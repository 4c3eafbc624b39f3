"""Named cases of per_channel_cast_fused."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.scales import ScaleLayout
from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.per_channel.per_channel_cast_fused import per_channel_cast_fused
from tk_quant.testing.per_channel.per_channel_cast import BF16, FP32, HIDDENS, NAMES, extremes, normal, strided
from tk_quant.testing.per_token import per_token_cast as by_token

Make = Callable[[str], dict[str, Any]]
MakeInput = Callable[[str], Any]
MakeMap = Callable[[str], torch.Tensor | None]


def pair(num_tokens: int, hidden: int, special: bool = False) -> MakeInput:
    """e4m3 codes with blocks of (1, 128); `special` adds NaN codes, and NaN and infinity to sf."""
    return by_token.pair(num_tokens, hidden, "e4m3", (1, 128), ScaleLayout.ROW_MAJOR, special)


def strided_pair(num_tokens: int, hidden: int, extra: int) -> MakeInput:
    """A pair whose data rows have gaps of `extra` bytes."""

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data, sf = pair(num_tokens, hidden + extra)(device)
        return data[:, extra:], sf[:, : hidden // 128].contiguous()

    return build


def pair_with_sf_from(num_tokens: int, hidden: int, first: int) -> MakeInput:
    """A pair whose sf start at element `first` of their allocation."""

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data, sf = pair(num_tokens, hidden)(device)
        return data, torch.cat([sf.new_zeros(first), sf.flatten()])[first:].view(sf.shape)

    return build


def tiny_pair(num_tokens: int, hidden: int) -> MakeInput:
    """A pair with values around 1e-9."""

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data, sf = pair(num_tokens, hidden)(device)
        return data, sf * 2.0**-40

    return build


def nowhere(device: str) -> None:
    """No map."""


def scattered(num_rows: int, num_tokens: int) -> MakeMap:
    """Rows in any order, some of them several times; about a tenth is padding, of various negative values."""
    low = -(num_tokens // 9) - 1
    return lambda device: torch.randint(low, num_tokens, (num_rows,), device=device, dtype=torch.int32)


def padding_only(num_rows: int) -> MakeMap:
    """A map of padding rows alone: all -1."""
    return lambda device: torch.full((num_rows,), -1, device=device, dtype=torch.int32)


def past_the_end(num_rows: int, num_tokens: int) -> MakeMap:
    """A map with indices past the last token too, from num_tokens to the largest int32."""

    def build(device: str) -> torch.Tensor:
        rows = torch.randint(0, 2 * num_tokens + 1, (num_rows,), device=device, dtype=torch.int32)
        rows[1], rows[2], rows[3] = num_tokens, 2**31 - 1, -(2**31)
        return rows

    return build


def segments(num_experts: int, rows: int, padding: int, num_tokens: int) -> MakeMap:
    """A map as in a mixture of experts: each expert's tokens in ascending order, then its padding."""

    def build(device: str) -> torch.Tensor:
        tokens = torch.randint(0, num_tokens, (num_experts, rows), device=device).sort(dim=1).values
        tokens[:, rows - padding :] = -1
        return tokens.flatten().to(torch.int32)

    return build


def make(x: MakeInput, rows: MakeMap = nowhere, round_sf: bool = False, **more: Any) -> Make:
    """Arguments of the op."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        return {
            "x": values,
            "fmt": "e4m3",
            "num_per_tokens": 128,
            "round_sf": round_sf,
            "num_per_channels": 128 if isinstance(values, tuple) else None,
            "pos_to_token": rows(device),
            **more,
        }

    return build


def _input(kind: str, num_tokens: int, hidden: int) -> MakeInput:
    return pair(num_tokens, hidden) if kind == "pair" else normal(num_tokens, hidden, BF16 if kind == "bf16" else FP32)


def _case(kind: str, num_tokens: int, hidden: int, round_sf: bool, **roles: Any) -> Case:
    name = f"{kind}{'-round' if round_sf else ''}-h{hidden}-t{num_tokens}"
    return Case(name, make(_input(kind, num_tokens, hidden), round_sf=round_sf), **roles)


def _gathered(kind: str, num_tokens: int, num_rows: int, hidden: int, round_sf: bool, **roles: Any) -> Case:
    name = f"{kind}{'-round' if round_sf else ''}-h{hidden}-t{num_tokens}-to-{num_rows}"
    x = _input(kind, num_tokens, hidden)
    return Case(name, make(x, scattered(num_rows, num_tokens), round_sf), **roles)


_MODEL_ROWS = segments(256, 136, 8, 4096)


def _bench(kind: str, hidden: int, round_sf: bool = False, **roles: Any) -> Case:
    name = f"{kind}{'-round' if round_sf else ''}-h{hidden}-t4096-to-34816-bench"
    return Case(name, make(_input(kind, 4096, hidden), _MODEL_ROWS, round_sf), bench=True, gpu=False, **roles)


def _least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Each output and each input once, whichever rows the map names."""
    values, rows = kwargs["x"], kwargs["pos_to_token"]
    inputs = (*values, rows) if isinstance(values, tuple) else (values, rows)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs) if tensor is not None)


SPEC = OpSpec(
    op=per_channel_cast_fused,
    reference=reference.per_channel_cast_fused,
    least_bytes=_least_bytes,
    cases=(
        *(
            _case(kind, tokens, 256, round_sf, small=True, modes=tokens == 128 and round_sf)
            for kind in ("bf16", "fp32", "pair")
            for round_sf in (False, True)
            for tokens in (0, 128, 384)
        ),
        # Numbers of rows that 128 divides, and others, which leave the last block partial.
        *(
            _gathered(kind, tokens, rows, 256, rows == 144, small=True, modes=rows == 16 and tokens == 5)
            for kind in ("bf16", "fp32", "pair")
            for tokens, rows in ((5, 0), (5, 16), (70, 144), (1, 400), (70, 256), (17, 112))
        ),
        _gathered("bf16", 33, 80, 192, False, small=True),
        *(
            Case(
                f"{name}-{kind}-h256",
                make(_input(kind, tokens, 256), rows),
                small=True,
            )
            for kind in ("bf16", "fp32", "pair")
            for name, tokens, rows in (
                ("padding-only", 9, padding_only(160)),
                ("no-tokens", 0, padding_only(144)),
                ("past-the-end", 40, past_the_end(144, 40)),
            )
        ),
        *(
            Case(
                f"{name}{'-round' if round_sf else ''}-extremes",
                make(x, rows, round_sf),
                small=True,
            )
            for round_sf in (False, True)
            for name, x, rows in (
                ("bf16", extremes(128, BF16), nowhere),
                ("fp32", extremes(128, FP32), nowhere),
                ("bf16-scattered", extremes(128, BF16), scattered(272, 128)),
                ("fp32-scattered", extremes(128, FP32), scattered(272, 128)),
                ("pair", pair(256, 256, special=True), nowhere),
                ("pair-scattered", pair(64, 512, special=True), scattered(272, 64)),
            )
        ),
        # Another least amax, in the kernels for few rows and for many.
        *(
            Case(
                f"{kind}{'-round' if round_sf else ''}-h{hidden}-to-{rows}-tiny",
                make(x, scattered(rows, 64), round_sf, sf_clamp_min=by_token.LEAST_AMAX["e4m3"]),
                small=True,
            )
            for kind, x, hidden, rows, round_sf in (
                ("bf16", by_token.tiny(64, 192, BF16), 192, 144, True),
                ("pair", tiny_pair(64, 256), 256, 144, False),
                ("pair", tiny_pair(64, 2048), 2048, 3616, False),
            )
        ),
        # On an H200, about the fewest rows for which the kernel for many gathered rows is chosen, and the fewest for
        # which its first blocks prefetch columns of later ones.
        *(
            Case(
                f"pair-h{hidden}-t70-to-{rows}-past-the-end",
                make(pair(70, hidden, special=True), past_the_end(rows, 70)),
                small=True,
            )
            for hidden, rows in ((2048, 3616), (7168, 3856))
        ),
        *(
            Case(
                f"{NAMES[dtype]}-apart{extra}-from{first}",
                make(strided(50, 192, dtype, extra, first), scattered(144, 50)),
                small=True,
                compile=True,
            )
            for dtype, extra, first in ((BF16, 8, 8), (BF16, 3, 1), (FP32, 1, 1))
        ),
        *(
            Case(
                f"pair-apart{extra}{name}",
                make(strided_pair(128, 256, extra), rows),
                small=True,
                compile=True,
            )
            for extra in (128, 8, 4, 2, 1)
            for name, rows in (("", nowhere), ("-scattered", scattered(144, 128)))
        ),
        *(
            _case(kind, tokens, hidden, kind == "pair", compile=tokens == 3968)
            for kind in ("pair", "fp32")
            for tokens, hidden in ((128, 7168), (3968, 2560), (8064, 4096))
        ),
        *(
            _gathered("pair", tokens, rows, hidden, hidden % 1024 == 0, compile=tokens == 1)
            for tokens, rows, hidden in (
                *((1, 16, 7168), (17, 128, 2048), (64, 4000, 2560), (4001, 8000, 3072), (4001, 34784, 4096)),
                *((8001, 16000, 6144), (4001, 20000, 7168), (4096, 336, 1152), (8001, 8016, 128), (300, 65552, 128)),
            )
        ),
        *(
            _gathered(kind, tokens, rows, hidden, False, compile=tokens == 1)
            for kind in ("bf16", "fp32")
            for tokens, rows, hidden in ((1, 16, 7168), (64, 4000, 576), (4001, 20000, 2048), (8001, 8016, 3072))
        ),
        *(
            _bench(kind, 7168, round_sf, model_shape=kind == "pair", compile=kind == "pair")
            for kind, round_sf in (("pair", False), ("pair", True), ("bf16", False), ("fp32", False))
        ),
        # The kernel for few rows; the first bench case has the one for many.
        Case("pair-h7168-t64-to-512", make(pair(64, 7168), scattered(512, 64)), model_shape=True),
        *(_bench("pair", hidden) for hidden in (640, *HIDDENS[1:-1])),
        *(
            Case(
                f"pair-h7168-t{tokens}-to-{rows}-bench",
                make(pair(tokens, 7168), scattered(rows, tokens)),
                bench=True,
                gpu=False,
            )
            for tokens, rows in ((1, 16), (64, 544), (4001, 16000), (8001, 68000))
        ),
        Case("pair-h7168-t8192-bench", make(pair(8192, 7168)), bench=True, gpu=False, compile=True),
    ),
)
