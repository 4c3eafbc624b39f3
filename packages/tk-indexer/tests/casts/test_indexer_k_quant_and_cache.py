"""indexer_k_quant_and_cache."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import tk_indexer
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.trees import empty

BF16, F32 = torch.bfloat16, torch.float32
INF, NAN = math.inf, math.nan


def keys(kind: str, tokens: int, dim: int, device: str) -> Tensor:
    """Float32 keys of very different sizes; "special" has zeros of both signs, NaN, infinity and the least amax."""
    k = torch.randn(tokens, dim, device=device) * 2.0 ** torch.randint(-30, 30, (tokens, 1), device=device)
    if kind == "special":
        chosen = torch.rand(tokens, dim, device=device)
        k = torch.where(chosen < 0.002, NAN, k)
        k = torch.where((chosen > 0.5) & (chosen < 0.502), -INF, k)
        row = torch.arange(tokens, device=device)[:, None]
        k = torch.where(row % 5 == 1, torch.where(chosen < 0.5, 0.0, torch.full_like(k, -0.0)), k)
        k = torch.where(row % 5 == 2, 1e-4 * chosen, k)
    if kind == "groups":  # every 32 channels of another size: zeros of both signs, below the least amax, up to the top
        size = torch.randint(-60, 60, (tokens, dim // 32, 1), device=device).float().exp2()
        chosen = torch.rand(tokens, dim // 32, 1, device=device)
        size = torch.where(chosen < 0.1, -0.0, torch.where(chosen < 0.2, 2.0**-126, size))
        size = torch.where(chosen > 0.9, 2.0**125, size)
        k = (torch.randn(tokens, dim // 32, 32, device=device).clamp(-5, 5) * size).view(tokens, dim)
    if kind == "edges":  # amax at, and next to, 448 times a power of two
        k = k.clamp(-1, 1)
        k[:, 3] = 448 * (1 + 2.0**-7 * torch.randint(-1, 2, (tokens,), device=device)) * 2.0**-5
    if kind == "ties":  # halfway between codes of e2m1, and next to that; amax at, and next to, 6 times a power of two
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0], device=device)
        near = 1 + 2.0**-7 * torch.randint(-1, 2, (tokens, dim), device=device)
        k = (
            ties[torch.randint(0, 8, (tokens, dim), device=device)]
            * near
            * torch.randn(tokens, dim, device=device).sign()
        )
        k[:, 7::32] = 6 * near[:, 7::32]
        k = k * 2.0 ** torch.randint(-9, 9, (tokens, 1), device=device)
    return k


def make(
    tokens: int,
    dim: int = 128,
    kind: str = "normal",
    *,
    fp4: bool = False,
    dtype: torch.dtype = BF16,
    block_kv: int = 64,
    num_blocks: int | None = None,
    scale_fmt: str | None = "ue8m0",
    rope: str | None = None,
    table: torch.dtype = F32,
    rope_first: bool = True,
    hadamard: bool = False,
    pad: int = 0,
    first_element: int = 0,
    gap: int | None = None,
    wild: bool = False,
) -> Make:
    """Keys with `pad` channels between rows; a cache of three dimensions, or four, with `gap` bytes between blocks."""

    def build(device: str) -> dict[str, Any]:
        blocks = -(-tokens // block_kv) + 2 if num_blocks is None else num_blocks
        k = empty(tokens, dim + pad, dtype=dtype, device=device, first_element=first_element)[:, :dim]
        k.copy_(keys(kind, tokens, dim, device))
        width = (dim // 2 if fp4 else dim) + 4
        size = block_kv * width
        cache = torch.randint(0, 256, (blocks, size + (gap or 0)), dtype=torch.uint8, device=device)
        cache = cache[:, :size].view(blocks, block_kv, *(() if gap is None else (1,)), width)
        slots = torch.argsort(torch.rand(max(blocks * block_kv, tokens), device=device))[:tokens]
        positions = torch.randint(0, 50, (tokens,), device=device)
        if wild:
            share = torch.rand(tokens, device=device)
            slots = torch.where(share < 0.2, -1 - slots, torch.where(share > 0.8, slots + blocks * block_kv, slots))
            slots = torch.where(share > 0.9, slots + 2**40, slots)
            positions = torch.where(share < 0.5, positions, 100 * positions - 2000)
        options: dict[str, Any] = {"positions": None, "cos_sin_cache": None}
        if rope is not None:
            angles = torch.rand(50, 32, device=device) * 100
            options = {"positions": positions, "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1).to(table)}
        return {
            "k": k,
            "kv_cache": cache,
            "slot_mapping": slots,
            "quant_block_size": 32 if fp4 else dim,
            "scale_fmt": scale_fmt,
            **options,
            "rope_first": rope_first,
            "is_neox": rope != "interleaved",
            "hadamard": hadamard,
        }

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Keys and slots read, and positions with their table; data and factors written."""
    tokens, dim = kwargs["k"].shape
    of_rope = sum(x.nbytes for x in (kwargs["positions"], kwargs["cos_sin_cache"]) if x is not None)
    return kwargs["k"].element_size() * tokens * dim + tokens * (8 + kwargs["kv_cache"].shape[-1]) + of_rope


def bench(tokens: int, name: str, **options: Any) -> Case:
    model_shape = options.pop("model_shape", False)
    return bench_case(f"t{tokens}-{name}", make(tokens, **options), model_shape=model_shape)


SPEC = OpSpec(
    op=tk_indexer.indexer_k_quant_and_cache,
    mutates=("kv_cache",),
    least_bytes=least_bytes,
    cases=(
        Case("t37-d128", make(37), small=True, modes=True, compile=True),
        Case(
            "t37-d128-neox-hadamard-wild",
            make(37, rope="neox", hadamard=True, gap=48, wild=True, pad=8),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "t41-d64-interleaved-last-float32",
            make(41, 64, dtype=F32, rope="interleaved", rope_first=False, table=BF16, hadamard=True, block_kv=32),
            small=True,
            compile=True,
        ),
        Case(
            "t33-d32-divided-odd-rows",
            make(33, 32, scale_fmt=None, block_kv=128, pad=3, first_element=1, gap=0),
            small=True,
            compile=True,
        ),
        Case("t50-d128-last-special", make(50, 128, "special", rope="neox", rope_first=False), small=True),
        Case("t50-d64-special-divided", make(50, 64, "special", dtype=F32, scale_fmt="", pad=1), small=True),
        Case("t50-d128-special", make(50, 128, "special", dtype=F32), small=True),
        Case("t50-d32-edges", make(50, 32, "edges"), small=True),
        Case("t21-d32-hadamard", make(21, 32, hadamard=True, block_kv=32), small=True),
        Case(
            "t37-d128-fp4-interleaved-last-hadamard-wild",
            make(37, fp4=True, rope="interleaved", rope_first=False, hadamard=True, gap=48, wild=True, pad=8),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "t41-d64-fp4-groups-float32",
            make(41, 64, "groups", fp4=True, dtype=F32, block_kv=32),
            small=True,
            compile=True,
        ),
        Case("t50-d128-fp4-groups", make(50, 128, "groups", fp4=True, block_kv=128), small=True),
        Case("t50-d64-fp4-ties-odd-rows", make(50, 64, "ties", fp4=True, pad=3, first_element=1), small=True),
        Case("t0-d128-fp4", make(0, fp4=True), small=True),
        Case("t0-d128", make(0, rope="neox"), small=True),
        Case("t5-d128-no-blocks", make(5, num_blocks=0, wild=True), small=True),
        Case("t1-d128-one-block", make(1, num_blocks=1, gap=0, rope="interleaved"), small=True),
        *(
            Case(f"t4001-d{dim}-{rope}-{'first' if first else 'last'}", make(4001, dim, rope=rope, rope_first=first))
            for dim in (64, 128)
            for rope in ("neox", "interleaved")
            for first in (True, False)
        ),
        Case("t4001-d128-float32-wild", make(4001, dtype=F32, hadamard=True, rope="neox", wild=True, block_kv=128)),
        Case("t4001-d128-divided", make(4001, 128, "special", scale_fmt=None)),
        *(
            Case(f"t4001-d{dim}-fp4-{kind}-{name}", make(4001, dim, kind, fp4=True, dtype=dtype))
            for dim in (64, 128)
            for kind in ("groups", "ties")
            for name, dtype in (("bfloat16", BF16), ("float32", F32))
        ),
        bench(8192, "d128-neox-hadamard", rope="neox", hadamard=True, model_shape=True),
        bench(8192, "d128-neox", rope="neox"),
        bench(8192, "d128"),
        bench(256, "d128-neox-hadamard", rope="neox", hadamard=True, model_shape=True),
        bench(65536, "d128-neox-hadamard", rope="neox", hadamard=True),
        bench(8192, "d128-fp4-interleaved-hadamard", fp4=True, rope="interleaved", hadamard=True, rope_first=False),
        bench(8192, "d128-fp4", fp4=True),
    ),
)

test_tiers = tiers.tests(SPEC)


# ---- by hand


def cache_of(blocks: int, block_kv: int, dim: int) -> Tensor:
    return torch.full((blocks, block_kv, dim + 4), 0xAA, dtype=torch.uint8)


def quantize(k: list[list[float]], slots: list[int], cache: Tensor, **options: Any) -> None:
    x = torch.tensor(k)
    tk_indexer.indexer_k_quant_and_cache(x, cache, torch.tensor(slots), x.shape[1], "ue8m0", **options)


def test_a_key_and_its_factor_by_hand() -> None:
    cache = cache_of(2, 32, 32)
    quantize([[1.0, -0.5] * 16, [0.0, -0.0] * 16], [33, 0], cache)
    first, second = cache.view(2, -1)
    # 1 / 448 needs 2^-8, and 256 and -128 are 0x78 and 0xf0.
    assert second[32:64].tolist() == [0x78, 0xF0] * 16
    assert second[32 * 32 + 4 : 32 * 32 + 8].tolist() == [0, 0, 0x80, 0x3B]
    # An amax of 1e-4 is the least: 2^-22.
    assert first[:32].tolist() == [0x00, 0x80] * 16
    assert first[32 * 32 : 32 * 32 + 4].tolist() == [0, 0, 0x80, 0x34]
    changed = torch.zeros(2, 32 * 36, dtype=torch.bool)
    changed[1, 32:64] = changed[1, 1028:1032] = changed[0, :32] = changed[0, 1024:1028] = True
    assert (cache.view(2, -1)[~changed] == 0xAA).all()


def test_a_key_in_fp4_by_hand() -> None:
    cache = torch.full((2, 32, 36), 0xAA, dtype=torch.uint8)
    k = [[0.0, 0.5, 1.0, -1.5, 2.0, -3.0, 4.0, 6.0] * 4 + [0.1, -0.2, 0.0, 0.0] * 8, [-0.0] * 32 + [7.0] + [5.0] * 31]
    tk_indexer.indexer_k_quant_and_cache(torch.tensor(k), cache, torch.tensor([33, 0]), 32, "ue8m0")
    first, second = cache.view(2, -1)
    # 6 needs 1; 0.2 needs 2^-4, and 0.1 · 16 is nearest to 1.5, -0.2 · 16 to -3.
    assert second[32:64].tolist() == [0x10, 0xB2, 0xD4, 0x76] * 4 + [0xD3, 0x00] * 8
    assert second[32 * 32 + 4 : 32 * 32 + 8].tolist() == [127, 123, 0, 0]
    # Zeros have the least factor, 2^-126. 7 needs 2: 3.5 is as far from 3 as from 4, whose code is even; 2.5 from 2.
    assert first[:32].tolist() == [0x88] * 16 + [0x46] + [0x44] * 15
    assert first[32 * 32 : 32 * 32 + 4].tolist() == [1, 128, 0, 0]
    changed = torch.zeros(2, 32 * 36, dtype=torch.bool)
    changed[1, 32:64] = changed[1, 1028:1032] = changed[0, :32] = changed[0, 1024:1028] = True
    assert (cache.view(2, -1)[~changed] == 0xAA).all()


def test_groups_that_are_not_finite_have_byte_255(device: str) -> None:
    """The others are as they are without them."""
    torch.manual_seed(0)
    k = torch.randn(64, 128, device=device)
    caches = [torch.zeros(1, 64, 68, dtype=torch.uint8, device=device) for _ in range(2)]
    slots = torch.arange(64, device=device)
    tk_indexer.indexer_k_quant_and_cache(k, caches[0], slots, 32, "ue8m0")
    k[5, 40], k[6, 3], k[6, 127], k[7, 64] = NAN, INF, -INF, -NAN
    tk_indexer.indexer_k_quant_and_cache(k, caches[1], slots, 32, "ue8m0")
    (before, of_before), (after, of_after) = (
        (cache.view(-1)[: 64 * 64].view(64, 4, 16), cache.view(64, 68).view(-1)[64 * 64 :].view(64, 4))
        for cache in caches
    )
    bad = torch.zeros(64, 4, dtype=torch.bool, device=device)
    for row, group in ((5, 1), (6, 0), (6, 3), (7, 2)):
        bad[row, group] = True
    assert_equal(of_after, torch.where(bad, torch.full_like(of_before, 255), of_before))
    assert_equal(after[~bad], before[~bad])


def test_hadamard_of_a_unit_vector_by_hand() -> None:
    """Row 5 = 101b of the matrix: minus where bits 0 and 2 of the column have an odd sum."""
    cache = cache_of(1, 32, 64)
    quantize([[0.0] * 5 + [8.0] + [0.0] * 58], [7], cache, hadamard=True)
    signs = [-1 if (c & 1) ^ (c >> 2 & 1) else 1 for c in range(64)]
    # 8 / 8 = 1
    assert cache.view(-1)[7 * 64 : 8 * 64].tolist() == [0x78 if sign > 0 else 0xF8 for sign in signs]


def test_a_quarter_turn_by_hand() -> None:
    table = torch.zeros(3, 64)
    table[0, :32] = 1
    table[1, 32:] = 1  # x0, x1 → -x1, x0
    k = [[float(c + 1) for c in range(64)] + [0.0] * 64]
    options = {"cos_sin_cache": table, "positions": torch.tensor([1])}
    caches = [cache_of(1, 32, 128) for _ in range(3)]
    quantize(k, [0], caches[0], **options)
    quantize(k, [0], caches[1], is_neox=False, **options)
    quantize(k, [0], caches[2], rope_first=False, **options)
    # 64 / 448 needs 2^-2; all integers up to 16 have codes, from 32 on those that 4 divides.
    neox, pairs, last = (cache.view(-1)[:128].view(torch.float8_e4m3fn).float() / 4 for cache in caches)
    assert neox[:8].tolist() == [-32, -32, -36, -36, -36, -40, -40, -40]
    assert neox[32:48].tolist() == list(range(1, 17))
    assert pairs[:8].tolist() == [-2, 1, -4, 3, -6, 5, -8, 7]
    assert last[:16].tolist() == list(range(1, 17))


def test_what_has_no_slot_is_skipped() -> None:
    wide = torch.full((3, 32 * 68 + 16), 0xAA, dtype=torch.uint8)
    cache = wide[:, : 32 * 68].view(3, 32, 1, 68)
    quantize([[1.0] * 64] * 5, [-1, 96, 2**40, -(2**62), 2**62], cache)
    assert (wide == 0xAA).all()
    quantize([[1.0] * 64] * 2, [96, 95], cache)
    assert (wide != 0xAA).sum() == 68
    assert (wide[2, 31 * 64 : 32 * 64] == 0x78).all()
    assert wide[2, 32 * 64 + 31 * 4 : 32 * 68].tolist() == [0, 0, 0x80, 0x3B]


# ---- against numpy


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def row_of(kwargs: dict[str, Any], t: int) -> np.ndarray:
    """A key after rope and Hadamard, channel by channel."""
    x = kwargs["k"][t].float().numpy()
    if kwargs["positions"] is None and not kwargs["hadamard"]:
        return x
    x = rounded(x)
    if kwargs["positions"] is not None:
        table = kwargs["cos_sin_cache"].float().numpy()
        angles = table[min(max(int(kwargs["positions"][t]), 0), len(table) - 1)]
        first = 0 if kwargs["rope_first"] else len(x) - 64
        new = x.copy()
        for i in range(32):
            low, high = (first + i, first + i + 32) if kwargs["is_neox"] else (first + 2 * i, first + 2 * i + 1)
            new[low] = x[low] * angles[i] - x[high] * angles[32 + i]
            new[high] = x[high] * angles[i] + x[low] * angles[32 + i]
        x = rounded(new)
    if kwargs["hadamard"]:
        stride = 1
        while stride < len(x):
            x = np.array([x[c] + x[c + stride] if not c & stride else x[c - stride] - x[c] for c in range(len(x))])
            stride *= 2
        x = rounded(x * np.float32(len(x) ** -0.5))
    return x


def power_from(x: np.float32) -> np.float32:
    """The least power of two that is at least x."""
    mantissa, exponent = np.frexp(x)
    return np.float32(2.0 ** (exponent - (mantissa == 0.5)))


def e4m3_of(x: np.ndarray, scale_fmt: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a row's codes, and of its factor."""
    amax = max(np.abs(x).max(), np.float32(1e-4))
    sf, factor = amax / np.float32(448), np.float32(448) / amax
    if scale_fmt == "ue8m0":
        sf = power_from(sf)
        factor = np.float32(1) / sf
    return (x * factor).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), np.array([sf], np.float32).view(np.uint8)


def fp4_of(x: np.ndarray, _: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a row's codes, two each, and of the factors of 32 channels each."""
    groups = x.reshape(-1, 32)
    amax = np.maximum(np.abs(groups).max(axis=1), np.float32(6 * 2.0**-126))
    sf = np.array([power_from(y / np.float32(6)) for y in amax], np.float32)
    codes = (groups / sf[:, None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(-1) & 15
    factors = np.zeros(4, np.uint8)
    factors[: len(sf)] = sf.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    return codes[0::2] | codes[1::2] << 4, factors


def expected_cache(kwargs: dict[str, Any]) -> Tensor:
    cache = kwargs["kv_cache"].clone()  # keeps no gaps
    blocks, block_kv, width = cache.shape[0], cache.shape[1], cache.shape[-1]
    size = width - 4
    flat = cache.view(blocks, block_kv * width).numpy()
    for t, slot in enumerate(kwargs["slot_mapping"].tolist()):
        if not 0 <= slot < blocks * block_kv:
            continue
        codes, sf = (fp4_of if kwargs["quant_block_size"] == 32 < kwargs["k"].shape[1] else e4m3_of)(
            row_of(kwargs, t), kwargs["scale_fmt"]
        )
        block, key = slot // block_kv, slot % block_kv
        flat[block, key * size : (key + 1) * size] = codes
        flat[block, block_kv * size + 4 * key : block_kv * size + 4 * key + 4] = sf
    return cache


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (64, {"kind": "groups"}),
        (128, {"kind": "groups", "block_kv": 128, "gap": 32, "wild": True}),
        (64, {"kind": "ties", "pad": 5, "first_element": 1}),
        (128, {"kind": "ties", "block_kv": 32}),
        (64, {"rope": "neox", "hadamard": True}),
        (128, {"rope": "interleaved", "rope_first": False, "hadamard": True}),
    ],
)
def test_fp4_against_numpy(dim: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kwargs = make(60, dim, fp4=True, dtype=dtype, **options)("cpu")
    expected = expected_cache(kwargs)
    tk_indexer.indexer_k_quant_and_cache(**kwargs)
    assert_equal(kwargs["kv_cache"].contiguous(), expected)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("scale_fmt", ["ue8m0", None])
@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (32, {"block_kv": 128}),
        (32, {"hadamard": True}),
        (64, {"rope": "neox", "block_kv": 32}),
        (64, {"rope": "interleaved", "hadamard": True, "pad": 5, "first_element": 1}),
        (128, {"kind": "edges"}),
        (128, {"rope": "neox", "rope_first": False, "gap": 32, "table": BF16}),
        (128, {"rope": "interleaved", "rope_first": False, "wild": True}),
        (128, {"rope": "neox", "hadamard": True, "wild": True}),
    ],
)
def test_against_numpy(dim: int, options: dict[str, Any], scale_fmt: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kwargs = make(60, dim, dtype=dtype, scale_fmt=scale_fmt, **options)("cpu")
    expected = expected_cache(kwargs)
    tk_indexer.indexer_k_quant_and_cache(**kwargs)
    assert_equal(kwargs["kv_cache"].contiguous(), expected)


# ---- bad input

GOOD: dict[str, Any] = {
    "k": torch.zeros(3, 128),
    "kv_cache": torch.zeros(2, 32, 132, dtype=torch.uint8),
    "slot_mapping": torch.arange(3),
    "quant_block_size": 128,
    "scale_fmt": "ue8m0",
}
TABLE = torch.zeros(5, 64)

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"k": torch.zeros(3, 96), "quant_block_size": 96}, ValueError, "k .D.*32, 64, 128.*96"),
        ({"quant_block_size": 64}, ValueError, "quant_block_size.*32 or 128.*64"),
        ({"quant_block_size": 32}, ValueError, "kv_cache.*shape.*68.*132"),
        (
            {"quant_block_size": 32, "kv_cache": torch.zeros(2, 32, 68, dtype=torch.uint8), "scale_fmt": None},
            ValueError,
            "scale_fmt.*ue8m0.*None",
        ),
        ({"scale_fmt": "e8m0"}, ValueError, "scale_fmt.*ue8m0.*e8m0"),
        ({"kv_cache": torch.zeros(2, 48, 132, dtype=torch.uint8)}, ValueError, "kv_cache .block_kv.*32, 64, 128.*48"),
        ({"kv_cache": torch.zeros(2, 32, 128, dtype=torch.uint8)}, ValueError, "kv_cache.*shape.*132.*128"),
        ({"kv_cache": torch.zeros(2, 32, 2, 132, dtype=torch.uint8)}, ValueError, "kv_cache.*shape.*1, 132"),
        (
            {"kv_cache": torch.zeros(2, 33, 132, dtype=torch.uint8)[:, :32]},
            ValueError,
            "kv_cache.*multiple of 16.*4356",
        ),
        (
            {"kv_cache": torch.zeros(2, 32, 144, dtype=torch.uint8)[..., :132]},
            ValueError,
            "kv_cache.*132 bytes apart.*144",
        ),
        ({"slot_mapping": torch.arange(4)}, ValueError, "slot_mapping.*shape"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "cos_sin_cache.*beside positions"),
        ({"cos_sin_cache": TABLE}, ValueError, "positions.*beside cos_sin_cache"),
        ({"positions": torch.arange(2), "cos_sin_cache": TABLE}, ValueError, "positions.*shape"),
        ({"positions": torch.arange(3), "cos_sin_cache": torch.zeros(5, 32)}, ValueError, "cos_sin_cache.*shape.*64"),
        ({"positions": torch.arange(3), "cos_sin_cache": torch.zeros(0, 64)}, ValueError, "cos_sin_cache.*one row"),
        (
            {
                "k": torch.zeros(3, 32),
                "kv_cache": torch.zeros(2, 32, 36, dtype=torch.uint8),
                "quant_block_size": 32,
                "positions": torch.arange(3),
                "cos_sin_cache": TABLE,
            },
            ValueError,
            "positions.*None for 32 channels",
        ),
    ],
)


def test_debug_mode_refuses_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"cos_sin_cache": TABLE, "positions": torch.tensor([-3, 4, 0])}
    bad = {
        "slot_mapping": {"slot_mapping": torch.tensor([0, -1, 64])},
        "positions": {"cos_sin_cache": TABLE, "positions": torch.tensor([0, 5, 1])},
    }
    for options in bad.values():
        tk_indexer.indexer_k_quant_and_cache(**{**GOOD, **options})
    monkeypatch.setattr(env, "debug", lambda: True)
    for name, options in bad.items():
        with pytest.raises(ValueError, match=f"{name}: expected .* below"):
            tk_indexer.indexer_k_quant_and_cache(**{**GOOD, **options})
    tk_indexer.indexer_k_quant_and_cache(**{**GOOD, **rope, "slot_mapping": torch.tensor([63, -7, -1])})


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"rope": "neox", "hadamard": True}, {"fp4": True, "hadamard": True}])
def test_gpu_other_keys_do_not_matter(options: dict[str, Any]) -> None:
    kwargs = make(300, **options)("cuda")
    whole, alone = kwargs["kv_cache"].clone(), kwargs["kv_cache"].clone()
    tk_indexer.indexer_k_quant_and_cache(**{**kwargs, "kv_cache": whole})
    per_token = [name for name in ("k", "slot_mapping", "positions") if kwargs[name] is not None]
    for first in range(0, 300, 7):
        some = {name: kwargs[name][first : first + 7] for name in per_token}
        tk_indexer.indexer_k_quant_and_cache(**{**kwargs, **some, "kv_cache": alone})
    assert_equal(alone, whole)
