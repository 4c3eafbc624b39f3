"""apply_rotary."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core import env
from tk_core.arch import arch_from_name
from tk_core.kernel import capture
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers

BF16, FP32 = torch.bfloat16, torch.float32
_NAMES = {BF16: "bf16", FP32: "fp32"}


def angles(leading: tuple[int, ...], half: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, (…, half)."""
    angle = 2 * math.pi * torch.rand(*leading, half, device=device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def make(
    shape: tuple[int, ...],
    rot: int,
    dtype: torch.dtype = BF16,
    *,
    key_heads: int | None = None,
    cache: str = "rows",
    cache_dtype: torch.dtype = FP32,
    cache_rows: int = 23,
    positions: str = "none",
    view: tuple[int, int] | None = None,
    to_out: bool = False,
    special: bool = False,
    **flags: Any,
) -> Make:
    """Arguments for a query of this shape, and for a key with `key_heads` heads.

    `cache`: "rows", "sequences" (for each of the batch), "split" (HF's cos and sin), or "split-sequences".
    `positions`: "none", "int32", "int64", "shared" (by the sequences of a batch), or "outside" (some out of the cache).
    `view`: channels before and behind a head in memory. `special`: NaN, infinity and the largest values.
    """
    *tokens, heads, head_dim = shape

    def heads_of(device: str, num_heads: int) -> Tensor:
        before, behind = view or (0, 0)
        x = torch.randn(*tokens, num_heads, head_dim + before + behind, device=device).to(dtype)
        if special and x.numel():
            x[..., ::5] = torch.finfo(dtype).max
            x[..., 0, 1], x[..., 0, 3], x[..., -1, 4], x[..., -1, 6] = math.nan, math.inf, -math.inf, -0.0
        return x[..., before : before + head_dim]

    def build(device: str) -> dict[str, Any]:
        leading = (tokens[0], cache_rows) if "sequences" in cache else (cache_rows,)
        cos, sin = angles(leading, rot // 2, device, cache_dtype)
        if cache.startswith("split"):  # as HF has them, each angle twice
            cos, sin = (torch.cat((x, x), -1)[..., : rot // 2] for x in (cos, sin))
        else:
            cos, sin = torch.cat((cos, sin), -1), None
        query = heads_of(device, heads)
        key = None if key_heads is None else heads_of(device, key_heads)
        at = None
        if positions != "none":
            low, high = (
                (-3, cache_rows + 3) if positions == "outside" else (0, cache_rows - flags.get("seqlen_offset", 0))
            )
            of_tokens = tokens[-1:] if positions == "shared" else tokens
            at = torch.randint(low, high, of_tokens, device=device)
            at = at.to(torch.int32 if positions == "int32" else torch.int64).expand(tokens)
        others = [None if x is None or not to_out else heads_of(device, x.shape[-2]) for x in (query, key)]
        return {
            "query": query,
            "cos_sin_cache": cos,
            "key": key,
            "positions": at,
            "sin_cache": sin,
            **flags,
            "out": others[0],
            "key_out": others[1],
        }

    return build


def _case(name: str, shape: tuple[int, ...], rot: int, dtype: torch.dtype = BF16, **options: Any) -> Case:
    """A small case; its modes are compiled, too."""
    modes = options.pop("modes", False)
    compile_ = options.pop("compile", modes)
    return Case(
        f"{_NAMES[dtype]}-{name}", make(shape, rot, dtype, **options), small=True, compile=compile_, modes=modes
    )


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Each head read and written once, and as many rows of the cache as there are tokens."""
    query, cache = kwargs["query"], kwargs["cos_sin_cache"]
    heads = sum(x.nbytes for x in (query, kwargs["key"]) if x is not None)
    rows = min(query.shape[:-2].numel(), cache.shape[:-1].numel())
    return 2 * heads + rows * cache.shape[-1] * cache.element_size()


SPEC = OpSpec(
    op=tk_quant.apply_rotary,
    mutates=("query", "key", "out", "key_out"),
    least_bytes=least_bytes,
    cases=(
        _case("64-of-64", (5, 3, 64), 64, modes=True),
        _case("interleaved-64-of-64", (5, 3, 64), 64, interleaved=True),
        _case("key-positions-int64", (5, 4, 128), 128, key_heads=1, positions="int64", seqlen_offset=2, modes=True),
        _case(
            "key-interleaved-int32", (5, 4, 64), 64, key_heads=1, positions="int32", interleaved=True, conjugate=True
        ),
        _case("batch-shared-positions", (2, 7, 3, 64), 64, key_heads=2, positions="shared"),
        _case("batch-sequences-int32", (3, 5, 2, 64), 64, cache="sequences", positions="int32", modes=True),
        _case("batch-hf-bf16-cache", (2, 6, 3, 64), 64, key_heads=1, cache="split-sequences", cache_dtype=BF16),
        _case("hf-bf16-cache-interleaved", (6, 3, 32), 32, cache="split", cache_dtype=BF16, interleaved=True),
        _case("64-of-192-to-out", (5, 3, 192), 64, key_heads=1, to_out=True, modes=True),
        _case("16-of-23-to-out", (5, 3, 23), 16, to_out=True, positions="outside", conjugate=True),
        _case("interleaved-24-of-40-to-out", (5, 3, 40), 24, to_out=True, interleaved=True, compile=True),
        _case("24-of-24", (5, 3, 24), 24),
        _case("120-of-128-in-place", (5, 3, 128), 120, key_heads=2, positions="outside", compile=True),
        _case("512-of-512", (3, 2, 512), 512, interleaved=True),
        _case("rows-on-8-bytes", (5, 3, 64), 64, view=(4, 4)),
        _case("rows-on-2-bytes", (5, 3, 64), 64, view=(1, 6), interleaved=True, key_heads=1, compile=True),
        _case("gaps", (2, 5, 3, 64), 64, view=(64, 64), to_out=True, key_heads=1),
        _case("special", (9, 3, 64), 64, special=True, positions="outside", key_heads=1),
        _case("special-interleaved", (9, 3, 64), 64, special=True, positions="outside", interleaved=True),
        _case("64-of-64", (5, 3, 64), 64, FP32, modes=True),
        _case("interleaved-32-of-80-to-out", (5, 3, 80), 32, FP32, to_out=True, interleaved=True, key_heads=1),
        _case("512-of-512", (3, 2, 512), 512, FP32, positions="int64", conjugate=True, compile=True),
        _case("rows-on-4-bytes", (5, 3, 64), 64, FP32, view=(1, 2)),
        _case("special", (9, 3, 64), 64, FP32, special=True, positions="outside"),
        *(
            Case(f"{_NAMES[dtype]}-{name}", make(shape, rot, dtype, **options), small=True)
            for name, shape, rot, dtype, options in (
                ("offset-past-the-cache", (5, 3, 64), 64, BF16, {"seqlen_offset": 20}),
                ("offset-before-the-cache", (5, 3, 64), 64, BF16, {"seqlen_offset": -2, "positions": "int32"}),
                ("offset-of-64-bits", (5, 3, 64), 64, BF16, {"seqlen_offset": 2**32, "positions": "outside"}),
                ("no-tokens", (0, 3, 64), 64, BF16, {"key_heads": 1, "positions": "int64"}),
                ("no-sequences", (0, 4, 3, 64), 64, FP32, {"to_out": True}),
                ("no-heads-but-keys", (5, 0, 64), 64, BF16, {"key_heads": 2}),
                ("no-cache", (5, 3, 64), 64, BF16, {"cache_rows": 0}),
            )
        ),
        *(
            Case(f"bf16-{name}-h{heads}-t{num_tokens}", make((num_tokens, heads, 64), 64, cache_rows=9000, **options))
            for name, options in (
                ("keys", {"key_heads": 1, "positions": "int64"}),
                ("interleaved", {"interleaved": True, "positions": "int32"}),
            )
            for heads in (5, 64)
            for num_tokens in (1, 64, 4001, 8001)
        ),
        Case(
            "bf16-128-of-576-to-out-b3-t1333",
            make((3, 1333, 16, 576), 128, key_heads=3, cache_rows=2000, positions="shared", to_out=True),
        ),
        *(
            bench_case(
                f"bf16-{name}h64-t{num_tokens}",
                make((num_tokens, 64, 64), 64, cache_rows=num_tokens, **options),
                model_shape=num_tokens == 8192,
            )
            for name, options in (("", {}), ("interleaved-", {"interleaved": True}))
            for num_tokens in (64, 8192)
        ),
        bench_case(
            "bf16-128-h64-keys8-int64-t8192",
            make((8192, 64, 128), 128, key_heads=8, cache_rows=8192, positions="int64"),
            model_shape=True,
        ),
        bench_case("bf16-64-of-192-to-out-h64-t8192", make((8192, 64, 192), 64, cache_rows=8192, to_out=True)),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize(("interleaved", "expected"), [(False, [-3, -4, 1, 2]), (True, [-2, 1, -4, 3])])
def test_a_quarter_turn_by_hand(interleaved: bool, expected: list[int]) -> None:
    cache = torch.zeros(2, 16)
    cache[0, :8], cache[1, 8:] = 1, 1
    x = torch.zeros(2, 1, 17)
    x[..., 16] = 5
    places = [0, 1, 2, 3] if interleaved else [0, 1, 8, 9]
    x[..., places] = torch.tensor([1.0, 2, 3, 4])
    tk_quant.apply_rotary(x, cache, interleaved=interleaved)
    assert x[0, 0, places].tolist() == [1, 2, 3, 4]
    assert x[1, 0, places].tolist() == expected
    assert x[..., 16].tolist() == [[5], [5]]
    tk_quant.apply_rotary(x, cache, interleaved=interleaved, conjugate=True)
    assert x[1, 0, places].tolist() == [1, 2, 3, 4]


def test_roundings_by_hand() -> None:
    # fma(f, cos, -(s · sin)) keeps f · cos exact: with one more rounding the result would be 0.
    cache = torch.zeros(1, 16)
    cache[0, 0], cache[0, 8] = 1 + 2.0**-12, 1
    x = torch.zeros(1, 1, 16)
    x[0, 0, 0] = 1 + 2.0**-12
    x[0, 0, 8] = 1 + 2.0**-11
    tk_quant.apply_rotary(x, cache)
    assert x[0, 0, 0] == 2.0**-24
    # s' = fma(f, sin, RN(s · cos)): the product 1 + 2^-11 + 2^-12 + 2^-23 is a float32.
    assert x[0, 0, 8] == (1 + 2.0**-12) + (1 + 2.0**-11 + 2.0**-12 + 2.0**-23)


@pytest.mark.parametrize("interleaved", [False, True])
def test_against_complex_numbers(interleaved: bool, device: str) -> None:
    arguments = make((2, 50, 3, 96), 64, FP32, key_heads=2, positions="int64", to_out=True, interleaved=interleaved)
    kwargs = arguments(device)
    tk_quant.apply_rotary(**kwargs)
    cos, sin = kwargs["cos_sin_cache"].double()[kwargs["positions"]].chunk(2, -1)
    for x, found in ((kwargs["query"], kwargs["out"]), (kwargs["key"], kwargs["key_out"])):
        pairs = x.double()[..., :64].unflatten(-1, (32, 2) if interleaved else (2, 32))
        turned = torch.complex(*pairs.unbind(-1 if interleaved else -2)) * torch.complex(cos, sin)[..., None, :]
        parts = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
        torch.testing.assert_close(found[..., :64].double(), parts, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[..., 64:], x[..., 64:])


def test_forms_agree(device: str) -> None:
    """A key alone, in place, by HF's tensors, by positions, and as slices of one tensor: the same bits."""
    kwargs = make((2, 7, 3, 64), 64, key_heads=2, to_out=True)(device)
    tk_quant.apply_rotary(**kwargs)
    expected = kwargs["out"], kwargs["key_out"]
    query, cache, key = (kwargs[name] for name in ("query", "cos_sin_cache", "key"))
    both = torch.cat((query, key), 2)
    tk_quant.apply_rotary(both[:, :, :3], cache[:, :32], both[:, :, 3:], sin_cache=cache[:, 32:])
    assert_equal((both[:, :, :3].clone(), both[:, :, 3:].clone()), expected)
    places = torch.arange(7, device=device).expand(2, 7)
    tk_quant.apply_rotary(query, cache.expand(2, -1, -1), positions=places + 100, seqlen_offset=-100)
    tk_quant.apply_rotary(key.flatten(0, 1), cache, positions=places.int().flatten())
    assert_equal((query, key), expected)


def test_outside_of_the_cache_are_zeros(device: str) -> None:
    x = torch.full((4, 1, 20), -1.0, device=device)
    x[1], x[2] = math.nan, math.inf
    cos, sin = (torch.full((2, 8), value, device=device) for value in (1.0, 0.0))
    tk_quant.apply_rotary(x, cos, positions=torch.tensor([-1, 2, 2**40, 1], device=device), sin_cache=sin)
    assert (x[:3, :, :16].contiguous().view(torch.int32) == 0).all()
    assert (x[3] == -1).all()
    assert (x[0, :, 16:] == -1).all()


def test_one_launch_for_query_and_key() -> None:
    kwargs = make((5, 4, 64), 64, key_heads=1)("meta")
    with capture(arch_from_name("sm_90a")) as captured:
        tk_quant.apply_rotary(**kwargs)
    assert len(captured) == 1


@pytest.mark.parametrize("given", [{}, {"positions": torch.tensor([0, 1, 4])}])
def test_debug_mode_finds_positions_outside_of_the_cache(given: dict[str, Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    x, cache = torch.ones(3, 1, 16), torch.zeros(4, 16)
    with pytest.raises(ValueError, match=r"(positions|seqlen_offset): expected positions from 0 to 3, got"):
        tk_quant.apply_rotary(x, cache, **given, seqlen_offset=2)
    with pytest.raises(ValueError, match=r"expected positions from 0 to 3, got \[-1"):
        tk_quant.apply_rotary(x, cache, **given, seqlen_offset=-1)
    assert (x == 1).all()


QUERY, CACHE = torch.ones(4, 3, 64), torch.ones(9, 64)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": torch.ones(2, 2, 4, 3, 64)}, ValueError, "query: expected 3 or 4 dimensions, got 5"),
    ({"key": torch.ones(5, 3, 64)}, ValueError, r"key: expected shape \(4, key_heads, 64\)"),
    ({"key": torch.ones(4, 3, 32)}, ValueError, r"key: expected shape \(4, key_heads, 64\)"),
    ({"key": QUERY.bfloat16()}, TypeError, "key: expected dtype torch.float32"),
    ({"cos_sin_cache": torch.ones(9, 12)}, ValueError, "cos_sin_cache: expected 16 to 512 columns"),
    ({"cos_sin_cache": torch.ones(9, 8)}, ValueError, "cos_sin_cache: expected 16 to 512 columns"),
    ({"cos_sin_cache": torch.ones(9, 520)}, ValueError, "cos_sin_cache: expected 16 to 512 columns"),
    ({"cos_sin_cache": torch.ones(9, 72)}, ValueError, "cos_sin_cache: expected cos and sin for at most 64 channels"),
    ({"cos_sin_cache": torch.ones(4, 9, 64)}, ValueError, r"cos_sin_cache: expected shape \(cache_rows, rot\)"),
    ({"sin_cache": CACHE[:, :32]}, ValueError, r"sin_cache: expected shape \(9, 64\)"),
    ({"sin_cache": CACHE.bfloat16()}, TypeError, "sin_cache: expected dtype torch.float32"),
    ({"positions": torch.zeros(5, dtype=torch.int32)}, ValueError, r"positions: expected shape \(4\)"),
    ({"seqlen_offset": 2**63}, ValueError, "seqlen_offset"),
    ({"out": torch.ones(4, 3, 32)}, ValueError, r"out: expected shape \(4, 3, 64\)"),
    ({"out": QUERY.bfloat16()}, TypeError, "out: expected dtype torch.float32"),
    ({"out": QUERY}, ValueError, "out: expected memory of its own, got some of query"),
    ({"out": torch.ones(1, 3, 64).expand(4, 3, 64)}, ValueError, "out: expected elements apart in memory"),
    ({"out": QUERY.clone(), "key_out": QUERY.clone()}, ValueError, "key_out: expected None without key"),
    ({"out": QUERY.clone(), "key": QUERY.clone()}, ValueError, "key_out: expected a tensor beside key and out"),
    ({"key_out": QUERY.clone(), "key": QUERY.clone()}, TypeError, "out: expected a torch.Tensor, got NoneType"),
    ({"key": QUERY}, ValueError, "query: expected memory of its own, got some of key"),
    ({"query": torch.ones(1, 3, 64).expand(4, 3, 64)}, ValueError, "query: expected elements apart in memory"),
]
test_bad_input = tiers.bad_input(SPEC, {"query": QUERY, "cos_sin_cache": CACHE}, BAD)


def test_bad_cache_of_sequences() -> None:
    with pytest.raises(ValueError, match=r"cos_sin_cache: expected shape \(2, cache_rows, rot\), got \(3, 9, 64\)"):
        tk_quant.apply_rotary(torch.ones(2, 4, 3, 64), torch.ones(3, 9, 64))
    with pytest.raises(ValueError, match=r"positions: expected shape \(2, 4\), got \(4,\)"):
        tk_quant.apply_rotary(torch.ones(2, 4, 3, 64), CACHE, positions=torch.zeros(4, dtype=torch.int64))
