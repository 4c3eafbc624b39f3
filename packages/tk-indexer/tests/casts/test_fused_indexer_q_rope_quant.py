"""fused_indexer_q_rope_quant."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tk_indexer
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers

BF16, F32 = torch.bfloat16, torch.float32


def make(
    tokens: int,
    heads: int = 64,
    dim: int = 128,
    *,
    weights_dtype: torch.dtype = BF16,
    rope: str | None = None,
    table: torch.dtype = F32,
    rope_first: bool = True,
    hadamard: bool = False,
    pad: int = 0,
    wild: bool = False,
    fmt: str = "e4m3",
) -> Make:
    """Queries with `pad` channels after each head, and as many heads after each token's; weights likewise."""

    def build(device: str) -> dict[str, Any]:
        size = 2.0 ** torch.randint(-30, 30, (tokens, heads, 1), device=device)
        q = torch.empty(tokens, heads + pad, dim + pad, dtype=BF16, device=device)[:, :heads, :dim]
        q.copy_(torch.randn(tokens, heads, dim, device=device) * size)
        weights = torch.empty(tokens, heads + pad, dtype=weights_dtype, device=device)[:, :heads]
        weights.copy_(torch.randn(tokens, heads, device=device))
        positions, angles = torch.randint(0, 50, (tokens,), device=device), torch.rand(50, 32, device=device) * 100
        if wild:
            positions = 100 * positions - 2000
            share = torch.rand(tokens, heads, dim, device=device)
            if fmt == "e4m3":  # Codes of e2m1 are unspecified then.
                q.copy_(torch.where(share < 0.001, torch.nan, torch.where(share > 0.999, -torch.inf, q)))
            q.mul_(torch.arange(tokens, device=device)[:, None, None] % 5 != 1)
        return {
            "positions": None if rope is None else positions,
            "q": q,
            "cos_sin_cache": None if rope is None else torch.cat((angles.cos(), angles.sin()), 1).to(table),
            "weights": weights,
            "softmax_scale": dim**-0.5,
            "head_scale": 0.3,
            "is_neox": rope != "interleaved",
            "fmt": fmt,
            "rope_first": rope_first,
            "hadamard": hadamard,
        }

    return build


SPEC = OpSpec(
    op=tk_indexer.fused_indexer_q_rope_quant,
    cases=(
        Case("t3-h64-d128", make(3), small=True, modes=True, compile=True),
        Case(
            "t3-h32-d128-neox-hadamard-wild",
            make(3, 32, rope="neox", hadamard=True, pad=8, weights_dtype=F32, wild=True),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "t5-h16-d64-interleaved-odd-rows",
            make(5, 16, 64, rope="interleaved", rope_first=False, table=BF16, pad=3),
            small=True,
            compile=True,
        ),
        Case("t7-h16-d32-hadamard", make(7, 16, 32, hadamard=True), small=True),
        Case("t4-h16-d128-interleaved-last", make(4, 16, rope="interleaved", rope_first=False), small=True),
        Case(
            "t3-h64-d128-fp4-interleaved-last-hadamard-wild",
            make(3, rope="interleaved", rope_first=False, hadamard=True, pad=8, wild=True, fmt="e2m1"),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "t5-h16-d64-fp4-odd-rows", make(5, 16, 64, weights_dtype=F32, pad=3, fmt="e2m1"), small=True, compile=True
        ),
        Case("t0-h64-d128-fp4", make(0, fmt="e2m1"), small=True),
        Case("t0-h64-d128", make(0, rope="neox"), small=True),
        *(
            Case(f"t401-h{heads}-d{dim}-{rope}", make(401, heads, dim, rope=rope, hadamard=True, wild=True))
            for heads, dim in ((16, 64), (32, 128), (64, 128))
            for rope in ("neox", "interleaved")
        ),
        *(
            Case(f"t401-h32-d{dim}-fp4", make(401, 32, dim, rope="interleaved", hadamard=True, wild=True, fmt="e2m1"))
            for dim in (64, 128)
        ),
        bench_case("t4096-h64-d128-neox-hadamard", make(4096, rope="neox", hadamard=True), model_shape=True),
        bench_case("t4096-h64-d128-neox", make(4096, rope="neox")),
        bench_case("t8192-h32-d128-interleaved", make(8192, 32, rope="interleaved")),
        bench_case("t128-h64-d128-neox-hadamard", make(128, rope="neox", hadamard=True)),
        bench_case(
            "t4096-h64-d128-fp4-interleaved-hadamard",
            make(4096, rope="interleaved", rope_first=False, hadamard=True, fmt="e2m1"),
            model_shape=True,
        ),
        bench_case("t4096-h64-d128-fp4-interleaved", make(4096, rope="interleaved", rope_first=False, fmt="e2m1")),
    ),
)

test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("rope", [None, "neox", "interleaved"])
@pytest.mark.parametrize(("dim", "options"), [(64, {}), (128, {"hadamard": True, "rope_first": False, "pad": 2})])
def test_heads_are_cast_as_keys_are(dim: int, options: dict[str, Any], rope: str | None) -> None:
    """And weights become the products, left to right in float32."""
    torch.manual_seed(0)
    kwargs = make(6, 16, dim, rope=rope, **options)("cpu")
    data, weights = tk_indexer.fused_indexer_q_rope_quant(**kwargs)
    cache = torch.zeros(3, 32, dim + 4, dtype=torch.uint8)
    k, slots = kwargs["q"].reshape(96, dim), torch.arange(96)
    of_rope = {name: kwargs[name] for name in ("cos_sin_cache", "rope_first", "is_neox", "hadamard")}
    positions = None if rope is None else kwargs["positions"].repeat_interleave(16)
    tk_indexer.indexer_k_quant_and_cache(k, cache, slots, dim, "ue8m0", positions=positions, **of_rope)
    blocks = cache.view(3, -1)
    assert_equal(data.view(torch.uint8).view(3, -1), blocks[:, : 32 * dim].contiguous())
    sf = blocks[:, 32 * dim :].contiguous().view(F32).view(6, 16).numpy()
    products = kwargs["weights"].float().numpy() * sf * np.float32(dim**-0.5) * np.float32(0.3)
    assert_equal(weights, torch.from_numpy(products))


@pytest.mark.parametrize("rope", [None, "interleaved"])
@pytest.mark.parametrize(("dim", "options"), [(64, {}), (128, {"hadamard": True, "rope_first": False, "pad": 2})])
def test_fp4_heads_are_cast_as_keys_are(dim: int, options: dict[str, Any], rope: str | None) -> None:
    """And weights become the products without factors."""
    torch.manual_seed(0)
    kwargs = make(6, 16, dim, rope=rope, fmt="e2m1", **options)("cpu")
    (data, sf), weights = tk_indexer.fused_indexer_q_rope_quant(**kwargs)
    cache = torch.zeros(3, 32, dim // 2 + 4, dtype=torch.uint8)
    k, slots = kwargs["q"].reshape(96, dim), torch.arange(96)
    of_rope = {name: kwargs[name] for name in ("cos_sin_cache", "rope_first", "is_neox", "hadamard")}
    positions = None if rope is None else kwargs["positions"].repeat_interleave(16)
    tk_indexer.indexer_k_quant_and_cache(k, cache, slots, 32, "ue8m0", positions=positions, **of_rope)
    blocks = cache.view(3, -1)
    assert data.dtype == torch.int8
    assert_equal(data.view(torch.uint8).view(3, -1), blocks[:, : 16 * dim].contiguous())
    assert_equal(sf, blocks[:, 16 * dim :].contiguous().view(torch.int32).view(6, 16))
    products = kwargs["weights"].float().numpy() * np.float32(dim**-0.5) * np.float32(0.3)
    assert_equal(weights, torch.from_numpy(products))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_the_form_for_v4(fmt: str, device: str) -> None:
    """vLLM's for DeepSeek V4, whose seventh argument is use_fp4."""
    kwargs = make(5, rope="interleaved", rope_first=False, fmt=fmt)(device)
    names = "positions", "q", "cos_sin_cache", "weights", "softmax_scale", "head_scale"
    found = tk_indexer.fused_indexer_q_rope_quant_v4(*(kwargs[name] for name in names), fmt == "e2m1")
    assert_equal(found, tk_indexer.fused_indexer_q_rope_quant(**kwargs))


# ---- bad input


def good() -> dict[str, Any]:
    q, weights = torch.zeros(3, 16, 128, dtype=BF16), torch.zeros(3, 16)
    return {
        "positions": None,
        "q": q,
        "cos_sin_cache": None,
        "weights": weights,
        "softmax_scale": 1.0,
        "head_scale": 1.0,
    }


GOOD = good()
TABLE: Tensor = torch.zeros(5, 64)

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"q": torch.zeros(3, 8, 128, dtype=BF16)}, ValueError, "q .H.*16, 32, 64.*8"),
        ({"q": torch.zeros(3, 16, 256, dtype=BF16)}, ValueError, "q .D.*32, 64, 128.*256"),
        ({"weights": torch.zeros(3, 32)}, ValueError, "weights.*shape.*16.*32"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale.*finite"),
        ({"head_scale": float("inf")}, ValueError, "head_scale.*finite"),
        ({"fmt": "e5m6"}, ValueError, "fmt.*e4m3.*e2m1.*e5m6"),
        ({"fmt": "e2m1", "q": torch.zeros(3, 16, 32, dtype=BF16)}, ValueError, "fmt.*e4m3.*e2m1"),
        ({"positions": torch.arange(3)}, ValueError, "cos_sin_cache.*beside positions"),
        ({"cos_sin_cache": TABLE}, ValueError, "positions.*beside cos_sin_cache"),
        ({"positions": torch.arange(4), "cos_sin_cache": TABLE}, ValueError, "positions.*shape"),
    ],
)


def test_debug_mode_refuses_positions_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {**GOOD, "cos_sin_cache": TABLE, "positions": torch.tensor([0, 5, 1])}
    tk_indexer.fused_indexer_q_rope_quant(**bad)
    monkeypatch.setattr(env, "debug", lambda: True)
    with pytest.raises(ValueError, match=r"positions: expected positions below 5, got 5"):
        tk_indexer.fused_indexer_q_rope_quant(**bad)
    tk_indexer.fused_indexer_q_rope_quant(**{**bad, "positions": torch.tensor([-1, 4, 0])})
