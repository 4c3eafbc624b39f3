"""per_channel_cast_fused."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.arch import ARCHS, Arch
from tk_core.scales import ScaleLayout
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_quant import reference
from tk_quant.cast import gathered_recast

from ..per_token import test_per_token_cast as by_token
from ..per_token.test_per_token_cast import BENCH
from .test_per_channel_cast import BF16, FP32, HIDDENS, NAMES, extremes, normal, quantize, strided

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
    return Case(name, make(_input(kind, 4096, hidden), _MODEL_ROWS, round_sf), **BENCH, **roles)


def _least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Each output and each input once, whichever rows the map names."""
    values, rows = kwargs["x"], kwargs["pos_to_token"]
    inputs = (*values, rows) if isinstance(values, tuple) else (values, rows)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs) if tensor is not None)


SPEC = OpSpec(
    op=tk_quant.per_channel_cast_fused,
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
                compile=extra != 8,
            )
            for dtype, extra, first in ((BF16, 8, 8), (BF16, 3, 1), (FP32, 1, 1))
        ),
        *(
            Case(
                f"pair-apart{extra}{name}",
                make(strided_pair(128, 256, extra), rows),
                small=True,
                compile=extra in (4, 1),
            )
            for extra in (128, 8, 4, 2, 1)
            for name, rows in (("", nowhere), ("-scattered", scattered(144, 128)))
        ),
        *(
            _case(kind, tokens, hidden, kind == "pair", compile=(kind, tokens) == ("pair", 3968))
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
            Case(f"pair-h7168-t{tokens}-to-{rows}-bench", make(pair(tokens, 7168), scattered(rows, tokens)), **BENCH)
            for tokens, rows in ((1, 16), (64, 544), (4001, 16000), (8001, 68000))
        ),
        Case("pair-h7168-t8192-bench", make(pair(8192, 7168)), **BENCH, compile=True),
    ),
)


test_tiers = tiers.tests(SPEC)


def rows(*indices: int) -> torch.Tensor:
    """A map of 16 rows: these, and padding."""
    return torch.tensor([*indices, *[-1] * (16 - len(indices))], dtype=torch.int32)


def test_gather_by_hand() -> None:
    x = torch.zeros(3, 64)
    x[0, :4], x[1, :4], x[2, :4] = torch.tensor([448.0, 1, 0, -3]), torch.tensor([2.0, -448, 0, 0]), torch.tensor(7.0)
    data, sf = tk_quant.per_channel_cast_fused(x, "e4m3", 128, pos_to_token=rows(1, -5, 0, 0, 1))
    assert data.shape == (16, 64)
    assert sf.shape == (1, 64)
    assert sf[0, :2].tolist() == [1.0, 1.0]
    assert data.view(torch.uint8)[:5, 0].tolist() == [0x40, 0x00, 0x7E, 0x7E, 0x40]
    assert data.view(torch.uint8)[:5, 1].tolist() == [0xFE, 0x00, 0x38, 0x38, 0xFE]
    # -3 is all there is in channel 3; nothing in channel 2, for row 2 is not asked for.
    assert data.view(torch.uint8)[:5, 3].tolist() == [0x00, 0x00, 0xFE, 0xFE, 0x00]
    assert sf[0, 2] == np.float32(1e-4) / np.float32(448)
    assert not data.view(torch.uint8)[5:].any()


def test_requantizing_by_hand() -> None:
    # Two tokens with the same codes, on scales 1 and 2**-6; the second one's quotients are still exact.
    codes = torch.tensor([0x7E, 0x38, 0x01, 0xB9], dtype=torch.uint8)
    data = torch.zeros(2, 128, dtype=torch.uint8)
    data[:, :4] = codes
    x = (data.view(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0**-6]]))
    out, sf = tk_quant.per_channel_cast_fused(x, "e4m3", 128, True, 128, rows(0, 1))
    # The channels' amax are 448, 1, 2**-9 and 1.125; sf is the least power of two at least amax / 448.
    assert sf[0, :4].tolist() == [1.0, 2.0**-8, 2.0**-17, 2.0**-8]
    assert out.view(torch.uint8)[0, :4].tolist() == [0x7E, 0x78, 0x78, 0xF9]
    assert out.view(torch.uint8)[1, :4].tolist() == [0x4E, 0x48, 0x48, 0xC9]


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("num_rows", [None, 16, 128, 144, 400])
def test_against_numpy(num_rows: int | None, round_sf: bool) -> None:
    data, sf = pair(128, 256)("cpu")
    where = None if num_rows is None else scattered(num_rows, 128)("cpu")
    out, out_sf = tk_quant.per_channel_cast_fused((data, sf), "e4m3", 128, round_sf, 128, where)
    values = data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = values * np.repeat(sf.numpy(), 128, axis=1)
    if where is not None:
        values = np.where(where.numpy()[:, None] >= 0, values[where.numpy()], np.float32(0))
    expected, expected_sf = quantize(values, 128, round_sf)
    np.testing.assert_array_equal(out.view(torch.uint8).numpy(), expected)
    np.testing.assert_array_equal(out_sf.numpy(), expected_sf)


def test_indices_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 64)
    data, _ = tk_quant.per_channel_cast_fused(x, "e4m3", 128, pos_to_token=rows(0, 4, 2**31 - 1, 3))
    assert data.float()[:4, 0].tolist() == [448.0, 0.0, 0.0, 448.0]
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_quant.per_channel_cast_fused(x, "e4m3", 128, pos_to_token=rows(0, 3))
    with pytest.raises(ValueError, match="pos_to_token: expected indices below 4, got 4"):
        tk_quant.per_channel_cast_fused(x, "e4m3", 128, pos_to_token=rows(0, 4))


@pytest.mark.parametrize("arch", ARCHS.values())
def test_kernel_for_many_gathered_rows(arch: Arch) -> None:
    assert gathered_recast.is_fastest(34816, 7168, 16, arch.num_sms, arch) == (arch.sm in (90, 100, 103))
    # 7/4 tiles of 128 rows for each SM, and one more.
    assert not gathered_recast.is_fastest(128 * 231, 256, 16, 132, arch)
    assert gathered_recast.is_fastest(128 * 231 + 16, 256, 16, 132, arch) == (arch.sm in (90, 100, 103))
    assert not gathered_recast.is_fastest(34816, 7168, 8, arch.num_sms, arch)
    assert not gathered_recast.is_fastest(34816, 7168 + 128, 16, arch.num_sms, arch)


@pytest.mark.parametrize("hidden", [256, 2304, 7168])
@pytest.mark.parametrize("num_tokens", [0, 1, 4096, 16384, 10**6])
@pytest.mark.parametrize("num_rows", [16, 2064, 34816])
def test_prefetched_columns_are_columns(num_rows: int, num_tokens: int, hidden: int) -> None:
    first, count = gathered_recast.prefetched_columns(num_rows, num_tokens, hidden, 132)
    # A bulk prefetch takes multiples of 16 bytes.
    assert first % 16 == 0
    assert count % 16 == 0
    assert count >= 0
    assert count == 0 or first + count <= hidden
    assert count == 0 or (first + count) * num_tokens <= 11 << 20


def test_prefetched_columns_follow_those_of_the_first_blocks() -> None:
    # 132 SMs of 6 thread blocks each: 2.9 times the 272 tiles of rows.
    assert gathered_recast.prefetched_columns(34816, 4096, 7168, 132) == (1024, 1792)
    assert gathered_recast.prefetched_columns(34816, 4096, 4096, 132) == (768, 2048)
    assert gathered_recast.prefetched_columns(34816, 4096, 1280, 132) == (768, 512)
    assert gathered_recast.prefetched_columns(16000, 4001, 7168, 132) == (2048, 768)
    # 11 MiB hold 1280 columns, one tile past those of the first blocks, of at most 9011 tokens.
    assert gathered_recast.prefetched_columns(34816, 9011, 7168, 132) == (1024, 256)
    assert gathered_recast.prefetched_columns(34816, 9012, 7168, 132)[1] == 0
    assert gathered_recast.prefetched_columns(34816, 16384, 7168, 132)[1] == 0
    # The first block on each SM has 128 threads, each of which prefetches a row.
    assert gathered_recast.prefetched_columns(34816, 20 * 128, 7168, 20)[1] > 0
    assert gathered_recast.prefetched_columns(34816, 20 * 128 + 1, 7168, 20)[1] == 0


def _everywhere(num_rows: int, hidden: int, alignment: int, num_sms: int, arch: Arch) -> bool:
    return alignment == gathered_recast.ALIGNMENT and hidden % 256 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize(
    ("x", "where"),
    [
        (pair(64, 2304, special=True), scattered(272, 64)),
        (pair(64, 512, special=True), scattered(272, 64)),
        (pair(300, 2304), scattered(16, 300)),
        (pair(40, 2304), past_the_end(144, 40)),
        (pair(9, 2304), padding_only(160)),
        (pair(0, 256), padding_only(144)),
        (strided_pair(128, 2304, 128), scattered(1040, 128)),
        # sf aligned to 8 and to 4 bytes.
        (pair_with_sf_from(64, 2048, 2), scattered(272, 64)),
        (pair_with_sf_from(64, 2304, 1), scattered(272, 64)),
    ],
)
def test_kernel_for_many_gathered_rows_of_few(
    x: MakeInput, where: MakeMap, round_sf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_recast, "is_fastest", _everywhere)
    kwargs = make(x, where, round_sf)("cuda")
    found, expected = tk_quant.per_channel_cast_fused(**kwargs), reference.per_channel_cast_fused(**kwargs)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)


X = torch.zeros(256, 128)
PAIR = (X.to(torch.float8_e4m3fn), torch.ones(256, 1))


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "e4m3", "num_per_tokens": 128},
    [
        ({"x": X[:127]}, ValueError, "rows of x: expected a multiple of 128, got 127"),
        ({"x": X[:, :96]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 64, got 96"),
        ({"num_per_tokens": 32}, ValueError, "num_per_tokens: expected one of 128, got 32"),
        ({"num_per_channels": 128}, ValueError, "num_per_channels: expected None, for x is no pair, got 128"),
        ({"pos_to_token": rows()[:15]}, ValueError, r"pos_to_token.shape\[0\]: expected a multiple of 16, got 15"),
    ],
)


test_bad_pair = tiers.bad_input(
    SPEC,
    {"x": PAIR, "fmt": "e4m3", "num_per_tokens": 128, "num_per_channels": 128},
    [
        ({"x": (*PAIR, 1)}, ValueError, r"x: expected a pair \(data, sf\)"),
        ({"x": (X, PAIR[1])}, TypeError, r"x\[0\]: expected dtype torch.float8_e4m3fn"),
        (
            {"x": (PAIR[0][:, :64], PAIR[1])},
            ValueError,
            r"x\[0\].shape\[1\]: expected a positive multiple of 128, got 64",
        ),
        ({"x": (PAIR[0].t(), PAIR[1])}, ValueError, r"x\[0\]: expected stride 1"),
        ({"x": (PAIR[0][:100], PAIR[1][:100])}, ValueError, "rows of x: expected a multiple of 128, got 100"),
        ({"x": (PAIR[0], PAIR[1].half())}, TypeError, r"x\[1\]: expected dtype torch.float32"),
        ({"x": (PAIR[0], PAIR[1][:255])}, ValueError, r"x\[1\]: expected shape \(256, 1\), got \(255, 1\)"),
        ({"x": (PAIR[0], torch.ones(256, 2)[:, :1])}, ValueError, r"x\[1\]: expected contiguous"),
        ({"x": (PAIR[0], PAIR[1].to("meta"))}, ValueError, r"x\[1\]: expected device"),
        ({"num_per_channels": None}, ValueError, "num_per_channels: expected one of 128, got None"),
        ({"num_per_channels": 64}, ValueError, "num_per_channels: expected one of 128, got 64"),
        ({"num_per_tokens": 64}, ValueError, "num_per_tokens: expected one of 128, got 64"),
    ],
)
