"""The calls of TileKernels 2.1.0, whose SwiGLU functions have other positional arguments and results.

They are told from this package's by an argument's type, and stand for calls by keyword.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from tk_core import check
from tk_quant.cast.format import OUT_DTYPES

Function = TypeVar("Function", bound=Callable[..., Any])


def may_be_called(other: Callable[..., Callable[..., Any] | None]) -> Callable[[Function], Function]:
    """Let a function be called otherwise too: `other(*args, **kwargs)` is what then takes it and these arguments.

    `other` returns None for arguments that are the function's own.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            stands_for = other(args, kwargs)
            return function(*args, **kwargs) if stands_for is None else stands_for(function, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def forward_called_as_in_2_1(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """`_forward` if fmt stands second, where this package has a number."""
    return _forward if len(args) > 1 and _is_fmt(args[1]) else None


def _forward(
    function: Callable[..., Tensor],
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    **more: Any,
) -> Tensor:
    return function(
        x,
        fmt=fmt,
        psum_num_tokens_per_expert=psum_num_tokens_per_expert,
        topk_weights=topk_weights,
        routed_scaling_factor=routed_scaling_factor,
        clamp_value=clamp_value,
        clamped_count=clamped_count,
        **more,
    )


def forward_cast_called_as_in_2_1(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """`_forward_and_cast` if the fourth to sixth argument are those of 2.1.0, by their types and dimensions."""
    if len(args) < 4:
        return None
    weights = args[4] if len(args) > 4 else kwargs.get("topk_weights")
    by_pairs = isinstance(weights, Tensor) and weights.ndim != 1
    has_factor = len(args) > 5 and isinstance(args[5], int | float)
    return _forward_and_cast if has_factor or (args[3] is not None and not by_pairs) else None


def _forward_and_cast(
    function: Callable[..., Any],
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    **more: Any,
) -> Any:
    psum = psum_num_tokens_per_expert
    if topk_weights is None and isinstance(psum, Tensor) and psum.shape[:1] == x.shape[:1]:
        expected = "psum_num_tokens_per_expert or pos_to_token_topk by keyword, as both have a number for each position"
        check.require(False, "the fourth argument", expected, tuple(psum.shape))
    return function(
        *(x, fmt, num_per_channels),
        psum_num_tokens_per_expert=psum,
        topk_weights=topk_weights,
        routed_scaling_factor=routed_scaling_factor,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        round_sf=round_sf,
        use_packed_ue8m0=use_packed_ue8m0,
        clamp_value=clamp_value,
        clamped_count=clamped_count,
        **more,
    )


def backward_called_as_in_2_1(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """`_backward` if fmt stands third, where this package has a number, or the gradient has its name of 2.1.0."""
    return _backward if (len(args) > 2 and _is_fmt(args[2])) or "act_x_grad" in kwargs else None


def _backward(
    function: Callable[..., Any],
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    **more: Any,
) -> tuple[Tensor, ...]:
    out, *grads = function(
        *(_flat(x), act_x_grad),
        fmt=fmt,
        psum_num_tokens_per_expert=psum_num_tokens_per_expert,
        topk_weights=topk_weights,
        routed_scaling_factor=routed_scaling_factor,
        clamp_value=clamp_value,
        do_recompute=do_recompute,
        **more,
    )
    return tuple(each for each in (*grads, out) if each is not None)


def backward_cast_called_as_in_2_1(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """`_backward_and_cast` if there is a fmt, which this package's function lacks."""
    return _backward_and_cast if (len(args) > 2 and isinstance(args[2], str)) or "fmt" in kwargs else None


def _backward_and_cast(
    function: Callable[..., Any],
    x: tuple[Tensor, Tensor],
    act_x_grad: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    check.one_of("fmt", fmt, ("e4m3",))
    pair = tuple(map(_flat, x)) if isinstance(x, tuple | list) else x
    out, quantized, x_grad, weight_grad = function(
        *(pair, act_x_grad, None, None, None, num_per_channels, round_sf),
        psum_num_tokens_per_expert=psum_num_tokens_per_expert,
        topk_weights=topk_weights,
        routed_scaling_factor=routed_scaling_factor,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        use_packed_ue8m0=use_packed_ue8m0,
        clamp_value=clamp_value,
        do_recompute=do_recompute,
        **more,
    )
    return tuple(each for each in (x_grad, quantized, weight_grad, out) if each is not None)


def _is_fmt(value: Any) -> bool:
    return isinstance(value, str) and value in OUT_DTYPES


def _flat(x: Any) -> Any:
    """x with its dimensions but the last merged, as 2.1.0 takes a batch of experts."""
    return x.flatten(0, -2) if isinstance(x, Tensor) and x.ndim == 3 else x
