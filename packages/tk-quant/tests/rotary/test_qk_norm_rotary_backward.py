"""qk_norm_rotary_backward."""

from typing import Any

import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, calc_diff, tiers

from . import test_apply_rotary as rotary
from .test_apply_rotary import BF16, FP32
from .test_qk_norm_rotary import EPS, Weights, weights_of


def make(
    shape: tuple[int, ...],
    rot: int,
    dtype: torch.dtype = BF16,
    *,
    weights: Weights | None = None,
    weights_of_heads: bool = False,
    weight_offset: float = 0.0,
    buffer: torch.dtype | None = None,
    **options: Any,
) -> Make:
    """Arguments for a query of this shape; `buffer`: the dtype of weights' gradients that are added to."""

    def build(device: str) -> dict[str, Any]:
        given = {"seqlen_offset": 0, "interleaved": False} | rotary.make(shape, rot, dtype, **options)(device)
        query, key = given["query"], given["key"]
        both = list(weights_of(given, weights or (dtype, dtype), weights_of_heads))
        grads = [None if x is None else torch.randn(x.shape, device=device).to(dtype) for x in (query, key)]
        rstds = [None if x is None else (x.float().square().mean(-1) + EPS).rsqrt().contiguous() for x in (query, key)]
        buffers = [
            None if buffer is None or w is None else torch.randn(w.shape, device=device).to(buffer) for w in both
        ]
        return {
            "out_grad": grads[0],
            **{name: given[name] for name in ("query", "cos_sin_cache")},
            "query_weight": both[0],
            "key_weight": both[1],
            "query_rstd": rstds[0],
            "key_out_grad": grads[1],
            "key": key,
            "key_rstd": rstds[1],
            **{name: given[name] for name in ("positions", "interleaved", "seqlen_offset")},
            "weight_offset": weight_offset,
            "sin_cache": given["sin_cache"],
            "query_weight_grad": buffers[0],
            "key_weight_grad": buffers[1],
        }

    return build


def _case(name: str, shape: tuple[int, ...], rot: int, dtype: torch.dtype = BF16, roles: str = "", **more: Any) -> Case:
    flags = dict.fromkeys(("small", *roles.split()), True)
    return Case(f"{rotary._NAMES[dtype]}-{name}", make(shape, rot, dtype, **more), **flags)


SPEC = OpSpec(
    op=tk_quant.qk_norm_rotary_backward,
    mutates=("query_weight_grad", "key_weight_grad"),
    cases=(
        # Several rows a tile, one; ranges of unequal length; half a vector, idle lanes, several warps, pieces.
        _case("128-of-128", (90, 3, 128), 128, BF16, "compile modes", key_heads=2, positions="int64"),
        _case("interleaved-64-of-64", (33, 3, 64), 64, BF16, key_heads=1, interleaved=True),
        _case("64-of-128", (90, 3, 128), 64, BF16, positions="int32", seqlen_offset=2, weights=(FP32, FP32)),
        _case("24-of-40", (33, 3, 40), 24, BF16),
        _case("16-of-16", (300, 2, 16), 16, BF16, interleaved=True),
        _case("504-of-1032", (4, 3, 1032), 504, BF16),
        _case("interleaved-512-of-1040", (4, 2, 1040), 512, BF16, interleaved=True),
        _case("64-of-8200", (2, 2, 8200), 64, BF16),
        _case("128-of-128", (33, 3, 128), 128, FP32, key_heads=1, positions="outside"),
        _case("64-of-72", (33, 3, 72), 64, FP32),
        _case("512-of-4104", (2, 2, 4104), 512, FP32, "compile"),
        # Weights: none, of query alone, one for each head; buffers to add to.
        _case("plain", (9, 3, 128), 128, BF16, "compile", weights=(None, None), key_heads=2),
        _case("plain-key", (9, 3, 64), 64, weights=(FP32, None), key_heads=2, buffer=FP32),
        _case("gemma", (9, 3, 128), 128, weight_offset=1.0, key_heads=2),
        _case("add-fp32", (9, 3, 128), 128, BF16, "modes", key_heads=2, buffer=FP32),
        _case("add-bf16", (9, 3, 64), 64, FP32, buffer=BF16, key_heads=1),
        _case("weights-of-heads", (90, 3, 128), 128, BF16, weights_of_heads=True, key_heads=2),
        _case("batch-weights-of-heads", (3, 17, 2, 64), 32, BF16, weights_of_heads=True, buffer=FP32),
        # Batches, caches, strides.
        _case("batch", (2, 17, 3, 128), 128, BF16, "modes", key_heads=2, positions="int64"),
        _case("batch-sequences", (3, 5, 2, 64), 64, BF16, cache="sequences", positions="int32"),
        _case("batch-hf", (2, 6, 3, 64), 32, BF16, key_heads=1, cache="split-sequences", cache_dtype=BF16),
        _case("rows-on-8-bytes", (9, 3, 64), 64, BF16, view=(4, 4)),
        _case("rows-on-2-bytes", (9, 3, 64), 48, BF16, "compile", view=(1, 6), key_heads=1),
        _case("rows-on-4-bytes", (9, 3, 64), 64, FP32, view=(1, 2)),
        _case("gaps", (2, 5, 3, 128), 128, view=(128, 128), key_heads=1, positions="shared"),
        # Nothing.
        _case("no-tokens", (0, 3, 64), 64, key_heads=1, positions="int64"),
        _case("no-tokens-add", (0, 3, 64), 64, key_heads=1, buffer=FP32),
        _case("no-heads-but-keys", (5, 0, 64), 64, key_heads=2),
        _case("no-cache", (5, 3, 64), 64, cache_rows=0),
        # Sizes of real models.
        *(
            Case(f"bf16-{rot}-of-{dim}-h{heads}-t{num_tokens}", make((num_tokens, heads, dim), rot, **options))
            for rot, dim, heads, options in (
                (128, 128, 64, {"key_heads": 8, "positions": "int64", "buffer": FP32}),
                (64, 256, 16, {"key_heads": 2, "positions": "int32", "weight_offset": 1.0}),
            )
            for num_tokens in (1, 64, 4001)
        ),
        Case("fp32-128-of-128-h16-t4001", make((4001, 16, 128), 128, FP32, key_heads=2)),
        bench_case(
            "bf16-128-h64-keys8-t8192",
            make((8192, 64, 128), 128, key_heads=8, cache_rows=8192, positions="int64"),
            model_shape=True,
        ),
        bench_case("bf16-64-of-256-h16-keys2-t8192", make((8192, 16, 256), 64, key_heads=2, cache_rows=8192)),
    ),
)


test_tiers = tiers.tests(SPEC)

op = tk_quant.qk_norm_rotary_backward
FORMS = {
    "128-of-128": make((200, 3, 128), 128, key_heads=2, positions="outside", buffer=FP32),
    "48-of-72": make((2, 33, 3, 72), 48, FP32, key_heads=2, weight_offset=1.0),
    "weights-of-heads": make((200, 3, 64), 64, interleaved=True, key_heads=1, weights_of_heads=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_is_the_conjugate_and_then_the_norm(form: str, device: str) -> None:
    kwargs = FORMS[form](device)
    turned = [torch.empty_like(kwargs[name]) for name in ("out_grad", "key_out_grad")]
    of_rope = {name: kwargs[name] for name in ("positions", "interleaved")}
    grads = kwargs["out_grad"], kwargs["cos_sin_cache"], kwargs["key_out_grad"]
    tk_quant.apply_rotary(*grads, **of_rope, conjugate=True, out=turned[0], key_out=turned[1])
    expected = []
    for name, grad in zip(("query", "key"), turned):
        buffer = kwargs[f"{name}_weight_grad"]
        given = kwargs[name], kwargs[f"{name}_weight"], kwargs[f"{name}_rstd"], None, 1.0
        buffer = None if buffer is None else buffer.clone()
        expected.append(tk_quant.norm_backward(grad, *given, buffer, weight_offset=kwargs["weight_offset"]))
    found = op(**kwargs)
    assert_equal((found[0], found[2]), expected[0])
    assert_equal((found[1], found[3]), expected[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_against_autograd(interleaved: bool, device: str) -> None:
    kwargs = make((40, 3, 64), 48, FP32, positions="int64", interleaved=interleaved)(device)
    query, weight = (kwargs[name].double().requires_grad_() for name in ("query", "query_weight"))
    normed = query * (query.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    cos, sin = kwargs["cos_sin_cache"].double()[kwargs["positions"]].chunk(2, -1)
    pairs = normed[..., :48].unflatten(-1, (24, 2) if interleaved else (2, 24))
    turned = torch.complex(*pairs.unbind(-1 if interleaved else -2)) * torch.complex(cos, sin)[..., None, :]
    parts = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
    out = torch.cat((parts, normed[..., 48:]), -1)
    expected = torch.autograd.grad(out, (query, weight), kwargs["out_grad"].double())
    found = op(**kwargs)
    assert calc_diff(found[0], expected[0]) <= 1e-12
    assert (found[2].double() - expected[1]).norm() <= 1e-6 * expected[1].norm()
    assert found[1] is found[3] is None


X, RSTD, CACHE = torch.ones(4, 3, 64), torch.ones(4, 3), torch.ones(9, 64)
GOOD = {"out_grad": X, "query": X, "cos_sin_cache": CACHE, "query_weight": torch.ones(64), "key_weight": None}
GOOD |= {"query_rstd": RSTD, "key_out_grad": X, "key": X, "key_rstd": RSTD}

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"out_grad": torch.ones(4, 2, 64)}, ValueError, "out_grad: .*shape"),
        ({"key_out_grad": X.bfloat16()}, TypeError, "key_out_grad: .*float32"),
        ({"query_rstd": torch.ones(12)}, ValueError, "query_rstd: .*shape"),
        ({"key_rstd": torch.ones(4, 2)}, ValueError, "key_rstd: .*shape"),
        ({"key_rstd": None}, TypeError, "key_rstd: expected a torch.Tensor, got NoneType"),
        ({"key": None}, ValueError, "key_out_grad: expected None without key"),
        ({"key": None, "key_out_grad": None}, ValueError, "key_rstd: expected None without key"),
        ({"key_weight_grad": torch.ones(64)}, ValueError, "key_weight_grad: expected None without key_weight"),
        ({"query_weight_grad": torch.ones(3, 64)}, ValueError, "query_weight_grad: .*shape"),
        ({"query_weight_grad": GOOD["query_weight"]}, ValueError, "query_weight_grad: .*memory of its own"),
        ({"weight_offset": float("inf")}, ValueError, "weight_offset: .*finite"),
    ],
)
