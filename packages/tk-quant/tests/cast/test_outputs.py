"""`out` and `out_sf` of the casts: written where they fit, named errors where they do not."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core.testing import assert_equal
from tk_core.testing.trees import storage_bytes, unaligned

X = torch.linspace(-3, 3, 5 * 128).view(5, 128).bfloat16()
SF = torch.full((5, 4), 0.25)
BLOCK_SF = torch.full((1, 4), 0.25)
COL_MAJOR = {"use_tma_aligned_col_major_sf": True}
PACKED = {**COL_MAJOR, "round_sf": True, "use_packed_ue8m0": True}

SWIZZLED = {"round_sf": True, "use_swizzled_sf": True}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "token": (tk_quant.per_token_cast, {"fmt": "e4m3", "num_per_channels": 32}),
    "token-hidden": (tk_quant.per_token_cast, {"fmt": "e4m3", "num_per_channels": 128}),
    "token-col-major": (tk_quant.per_token_cast, {"fmt": "e4m3", "num_per_channels": 32, **COL_MAJOR}),
    "token-packed": (tk_quant.per_token_cast, {"fmt": "e2m1", "num_per_channels": 32, **PACKED}),
    "token-swizzled": (tk_quant.per_token_cast, {"fmt": "e4m3", "num_per_channels": 32, **SWIZZLED}),
    "token-nvfp4": (tk_quant.per_token_cast, {"fmt": "e2m1", "num_per_channels": 16, "tensor_sf": torch.tensor(0.5)}),
    "token-sf": (tk_quant.per_token_cast_with_sf_only, {"fmt": "e4m3", "num_per_channels": 32}),
    "token-sf-packed": (tk_quant.per_token_cast_with_sf_only, {"fmt": "e4m3", "num_per_channels": 32, **PACKED}),
    "token-data": (tk_quant.per_token_cast_with_precomputed_sf, {"fmt": "e2m1", "num_per_channels": 32, "sf": SF}),
    "block": (tk_quant.per_block_cast, {"fmt": "e4m3", "block_size": (32, 32)}),
    "block-packed": (tk_quant.per_block_cast, {"fmt": "e2m1", "block_size": (2, 32), **PACKED}),
    "block-sf": (tk_quant.per_block_cast_with_sf_only, {"fmt": "e4m3", "block_size": (2, 32), **COL_MAJOR}),
    "block-data": (
        tk_quant.per_block_cast_with_precomputed_sf,
        {"fmt": "e4m3", "block_size": (32, 32), "sf": BLOCK_SF},
    ),
}


def _call(name: str) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """The op, its arguments, and the name of the argument that it writes into."""
    op, kwargs = CALLS[name]
    return op, kwargs, "out_sf" if "sf_only" in op.__name__ else "out"


def _like(x: Any) -> Any:
    """New tensors of the same strides, with other bytes in them."""
    if isinstance(x, tuple):
        return tuple(map(_like, x))
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    storage_bytes(new).fill_(0x5A)
    return new


def _leaves(x: Any) -> list[Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


@pytest.mark.parametrize("name", CALLS)
def test_writes_what_it_would_return(name: str) -> None:
    op, kwargs, out = _call(name)
    expected = op(X, **kwargs)
    given = _like(expected)
    returned = op(X, **kwargs, **{out: given})
    for x, y in zip(_leaves(returned), _leaves(given), strict=True):
        assert x is y
    assert_equal(returned, expected)


@pytest.mark.parametrize("name", ["token", "token-sf-packed", "block-data"])
def test_compiled(name: str) -> None:
    op, kwargs, out = _call(name)
    expected = op(X, **kwargs)
    given = _like(expected)
    torch.compile(lambda x, given: op(x, **kwargs, **{out: given}), fullgraph=True, backend="eager")(X, given)
    assert_equal(given, expected)


@pytest.mark.parametrize("name", CALLS)
def test_refuses_what_does_not_fit(name: str) -> None:
    op, kwargs, out = _call(name)
    right = _like(op(X, **kwargs))
    where = [f"{out}[0]", f"{out}[1]"] if isinstance(right, tuple) else [out]
    for index, (argument, tensor) in enumerate(zip(where, _leaves(right), strict=True)):
        wrong: list[tuple[Any, type[Exception], str]] = [
            (7, TypeError, "expected a torch.Tensor"),
            (tensor.to("meta"), ValueError, "expected device"),
            (tensor.to(torch.float64), TypeError, "expected dtype"),
            (tensor[:0], ValueError, "expected shape"),
        ]
        if tensor.ndim == 2 and min(tensor.shape) > 1:
            apart = tensor.new_empty((tensor.shape[0], 3 * tensor.shape[1]))[:, : tensor.shape[1]]
            wrong.append((apart, ValueError, "expected (a contiguous tensor|contiguous|strides)"))
        for value, error, message in wrong:
            given = tuple(value if i == index else x for i, x in enumerate(_leaves(right)))
            with pytest.raises(error, match=f"^{re.escape(argument)}: {message}"):
                op(X, **kwargs, **{out: given if len(where) == 2 else value})
    if len(where) == 2:
        for pair in (right[0], right[:1], [*right, right[0]]):
            with pytest.raises((TypeError, ValueError), match=r"^out: expected a pair"):
                op(X, **kwargs, out=pair)


@pytest.mark.parametrize(
    ("flags", "error", "match"), [(COL_MAJOR, ValueError, "strides"), (PACKED, TypeError, "dtype")]
)
def test_refuses_sf_of_another_layout(flags: dict[str, bool], error: type[Exception], match: str) -> None:
    sf = tk_quant.per_block_cast_with_sf_only(X, "e4m3", (1, 32), **flags)
    with pytest.raises(error, match=f"^out_sf: expected {match}"):
        tk_quant.per_block_cast_with_sf_only(X, "e4m3", (1, 32), out_sf=sf)


def test_flags_in_the_order_of_both_versions() -> None:
    """TileKernels 1.0.0 has x_block_size before the flags, 2.1.0 has not."""
    expected = tk_quant.per_token_cast_with_sf_only(X, "e4m3", 32, **PACKED)
    assert_equal(tk_quant.per_token_cast_with_sf_only(X, "e4m3", 32, None, True, True, True), expected)
    assert_equal(tk_quant.per_token_cast_with_sf_only(X, "e4m3", 32, True, True, True), expected)
    assert_equal(
        tk_quant.per_token_cast_with_sf_only(X, "e4m3", 32, True, round_sf=True, use_packed_ue8m0=True), expected
    )
    data = tk_quant.per_token_cast_with_precomputed_sf(X, "e4m3", 32, SF)
    assert_equal(tk_quant.per_token_cast_with_precomputed_sf(X, "e4m3", 32, SF, False, True), data)
    with pytest.raises(ValueError, match="use_tma_aligned_col_major_sf: expected False"):
        tk_quant.per_token_cast_with_precomputed_sf(X, "e4m3", 32, SF, True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_gpu(name: str) -> None:
    """Also at addresses that are no multiple of 16 bytes, and in calls that are remembered."""
    op, kwargs, out = _call(name)
    x = X.cuda()
    kwargs = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    expected = op(x, **kwargs)
    for _ in range(3):
        given = _like(expected)
        op(x, **kwargs, **{out: given})
        assert_equal(given, expected)
    if all(leaf.is_contiguous() for leaf in _leaves(expected)):
        given = tuple(map(unaligned, _leaves(_like(expected))))
        op(x, **kwargs, **{out: given if isinstance(expected, tuple) else given[0]})
        assert_equal(given if isinstance(expected, tuple) else given[0], expected)
