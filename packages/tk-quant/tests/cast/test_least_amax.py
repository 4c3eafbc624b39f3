"""All casts that compute sf from an amax take the same sf_clamp_min, the least amax."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
import tk_quant
from tk_core.arch import arch_from_name
from tk_core.kernel import capture
from tk_core.testing import assert_equal
from tk_core.testing.trees import tensors, transfer

LEAST = 448 * 2.0**-126
Pair = tuple[Tensor, Tensor]


def inputs(device: str = "cpu") -> dict[str, Tensor]:
    """x below 1e-4 / 2, and what the ops of SwiGLU take besides."""
    torch.manual_seed(0)
    values = {"x": 1e-5 * torch.randn(128, 256), "gates": torch.randn(128, 256), "pairs": torch.arange(128).int()}
    return {name: value.to(device) for name, value in values.items()}


def of_swiglu(gates: Tensor, x: Tensor) -> Tensor:
    """Gates of any size beside tiny values."""
    return torch.cat((gates[:, :128], x[:, :128]), dim=1)


def swiglu_backward(x: Tensor, gates: Tensor, pairs: Tensor, **k: Any) -> Pair:
    """The cast of the gradient, for a gradient x."""
    pair, grad_out = tk_quant.per_token_cast(gates, "e4m3", 128), x[:, :128].bfloat16()
    maps = x.new_ones(128, 1), pairs, pairs.view(128, 1)
    return tk_quant.swiglu_backward_and_per_token_cast(pair, grad_out, *maps, 128, **k)[1]


# Each returns pairs of data and sf, or sf alone.
CALLS: dict[str, Callable[..., Any]] = {
    "per_token_cast": lambda x, k, **_: tk_quant.per_token_cast(x, "e4m3", 128, **k),
    "per_token_cast of a pair": lambda x, k, **_: tk_quant.per_token_cast(
        (x.sign().to(torch.float8_e4m3fn), x[:, :1].abs().contiguous()), "e4m3", 128, (1, 256), **k
    ),
    "per_token_cast_with_sf_only": lambda x, k, **_: tk_quant.per_token_cast_with_sf_only(x, "e4m3", 128, **k),
    "per_block_cast": lambda x, k, **_: tk_quant.per_block_cast(x, "e4m3", (128, 128), **k),
    "per_block_cast_with_sf_only": lambda x, k, **_: tk_quant.per_block_cast_with_sf_only(x, "e4m3", (32, 32), **k),
    "per_channel_cast": lambda x, k, **_: tk_quant.per_channel_cast(x, "e4m3", 128, **k),
    "per_channel_cast_and_transpose": lambda x, k, **_: tk_quant.per_channel_cast_and_transpose(
        x.bfloat16(), "e4m3", 32, **k
    ),
    "per_channel_cast_fused": lambda x, k, pairs, **_: tk_quant.per_channel_cast_fused(
        x, "e4m3", 128, pos_to_token=pairs, **k
    ),
    "per_token_and_channel_cast": lambda x, k, **_: tk_quant.per_token_and_channel_cast(x, "e4m3", **k),
    "swiglu_forward_and_per_token_cast": lambda x, k, gates, **_: tk_quant.swiglu_forward_and_per_token_cast(
        of_swiglu(gates, x), "e4m3", 128, **k
    ),
    "swiglu_forward_and_per_channel_cast": lambda x, k, gates, **_: (
        tk_quant.swiglu_forward_and_per_channel_cast_and_transpose(of_swiglu(gates, x).bfloat16(), "e4m3", 128, **k)
    ),
    "swiglu_backward_and_per_token_cast": lambda x, k, **more: swiglu_backward(x, **more, **k),
}


def call(name: str, sf_clamp_min: float | None, scale: float = 1.0, device: str = "cpu", **options: Any) -> Any:
    given = inputs(device)
    return CALLS[name](given.pop("x") * scale, {"sf_clamp_min": sf_clamp_min, **options}, **given)


def scaled(result: Any, scale: float) -> Any:
    """The same codes with scale factors times `scale`."""
    if isinstance(result, tuple):
        return tuple(scaled(each, scale) for each in result)
    return result * scale if result.dtype is torch.float32 else result


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_small_values_keep_their_codes(name: str, round_sf: bool) -> None:
    """A power of two goes into sf; with the format's own least amax it changes the codes."""
    for scale in (2.0**-20, 2.0**-60):
        assert_equal(call(name, LEAST, scale, round_sf=round_sf), scaled(call(name, LEAST, round_sf=round_sf), scale))


@pytest.mark.parametrize("name", CALLS)
def test_every_sf_is_at_least_that_of_the_least_amax(name: str) -> None:
    sf = {least: call(name, least) for least in (None, 1e-4, 3.0)}
    assert_equal(sf[None], sf[1e-4])
    factors = [each for each in tensors(sf[3.0]) if each.dtype is torch.float32]
    assert factors
    # |x| and all that is made of it are below 3.
    assert all(bool((each == torch.tensor(3.0) / 448).all()) for each in factors)


@pytest.mark.parametrize("name", CALLS)
def test_the_range_is_the_same_everywhere(name: str) -> None:
    call(name, 3)
    call(name, float(torch.finfo(torch.float32).max))
    for wrong in (0, 0.0, -1.0, math.nextafter(LEAST, 0), math.nan, math.inf, 1e300, 10**400):
        with pytest.raises(ValueError, match="sf_clamp_min: expected"):
            call(name, wrong)
    for wrong in (True, "1", torch.ones(())):
        with pytest.raises(TypeError, match="sf_clamp_min: expected a number"):
            call(name, wrong)


@pytest.mark.parametrize(("fmt", "largest", "group"), [("e2m1", 6, 32), ("e5m6", 65024, 256)])
def test_the_bound_is_that_of_the_format(fmt: str, largest: float, group: int) -> None:
    x = torch.zeros(2, 256)
    assert bool((tk_quant.per_token_cast(x, fmt, group, sf_clamp_min=largest * 2.0**-126)[1] == 2.0**-126).all())
    with pytest.raises(ValueError, match="sf_clamp_min: expected at least"):
        tk_quant.per_token_cast(x, fmt, group, sf_clamp_min=largest * 2.0**-127)


def test_nvfp4_has_no_least_amax() -> None:
    with pytest.raises(ValueError, match="sf_clamp_min: expected None with tensor_sf"):
        tk_quant.per_token_cast(torch.zeros(2, 64), "e2m1", 16, tensor_sf=torch.ones(1), sf_clamp_min=1.0)


@pytest.mark.parametrize("name", CALLS)
def test_another_value_needs_no_other_kernel(name: str) -> None:
    kernels = []
    for least in (None, LEAST, 3.0):
        with capture(arch_from_name("sm_90a")) as requests:
            call(name, least, device="meta")
        kernels.append(requests)
    assert kernels[0] == kernels[1] == kernels[2] != []


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_gpu_repeated_calls_take_their_own_value(name: str) -> None:
    for least in (None, LEAST, 3.0, LEAST, None):
        found = transfer(call(name, least, device="cuda"))
        with tk_core.backend("reference"):
            assert_equal(found, call(name, least, device="cuda"))
