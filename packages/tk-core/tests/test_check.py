"""Argument checks."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_core import check, env

_FLOATS = (torch.float32, torch.bfloat16)


def test_tensor_returns_the_shape() -> None:
    assert check.tensor("x", torch.zeros(3, 4), _FLOATS, ("num_tokens", 4)) == (3, 4)
    assert check.tensor("x", torch.zeros(0, 4), _FLOATS, ("num_tokens", "hidden")) == (0, 4)
    assert check.tensor("x", torch.zeros(4, 8)[:, 2:6], _FLOATS, ("num_tokens", 4), layout="rows") == (4, 4)
    assert check.tensor("x", torch.zeros(4, 8)[:, ::2], _FLOATS, ("num_tokens", 4), layout="any") == (4, 4)
    assert check.tensor("x", torch.zeros(4, 8)[:, ::8], _FLOATS, ("num_tokens", 1), layout="rows") == (4, 1)


@pytest.mark.parametrize("leading", [(), (0,), (3,), (2, 3), (2, 3, 5)])
def test_any_number_of_leading_dimensions(leading: tuple[int, ...]) -> None:
    x = torch.zeros(*leading, 4, 8)
    assert check.tensor("x", x, _FLOATS, (..., "streams", 8)) == x.shape
    assert check.tensor("x", x, _FLOATS, (*leading, 4, 8)) == x.shape
    with pytest.raises(ValueError, match=r"x: expected shape \(\.\.\., 5, 8\), got \(.*4, 8\)"):
        check.tensor("x", x, _FLOATS, (..., 5, 8))
    with pytest.raises(ValueError, match=r"x: expected shape \(\.\.\., streams, 8\), got \(8,\)"):
        check.tensor("x", torch.zeros(8), _FLOATS, (..., "streams", 8))


def _tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


_CPU = torch.device("cpu")
_WIDE = _tensor(4, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(check.tensor, "x", 3, _FLOATS, ("n",)), TypeError, "x: expected a torch.Tensor, got int"),
        (
            partial(check.tensor, "x", _tensor(3, dtype=torch.int32), _FLOATS, ("n",)),
            *(TypeError, "x: expected dtype torch.float32 or torch.bfloat16, got torch.int32"),
        ),
        (
            partial(check.tensor, "x", _tensor(3), _FLOATS, ("n", "m")),
            ValueError,
            r"x: expected shape \(n, m\), got \(3,",
        ),
        (
            partial(check.tensor, "x", _tensor(3, 5), _FLOATS, ("n", 4)),
            ValueError,
            r"x: expected shape \(n, 4\), got \(3, 5",
        ),
        (
            partial(check.tensor, "x", _tensor(3, device="meta"), _FLOATS, ("n",), device=_CPU),
            *(ValueError, "x: expected device cpu, got meta"),
        ),
        (
            partial(check.tensor, "x", _WIDE[:, :4], _FLOATS, ("n", "m")),
            *(ValueError, r"x: expected contiguous, got strides \(8, 1\)"),
        ),
        (
            partial(check.tensor, "x", _WIDE[:, ::2], _FLOATS, ("n", "m"), layout="rows"),
            *(ValueError, r"x: expected stride 1 in the last dimension, got strides \(8, 2\)"),
        ),
        (partial(check.multiple_of, "n", 7, 4), ValueError, "n: expected a multiple of 4, got 7"),
        (partial(check.one_of, "fmt", "e3", ("a", "b")), ValueError, "fmt: expected one of 'a', 'b', got 'e3'"),
        # What can't be hashed is none of those allowed.
        (partial(check.one_of, "fmt", ["a"], {"a": 1}), ValueError, "fmt: expected one of 'a'"),
        (partial(check.in_range, "k", 9, 1, 8), ValueError, "k: expected 1 to 8, got 9"),
        (partial(check.in_range, "k", 1.0, 1, 8), TypeError, "k: expected an int, got 1.0"),
        (partial(check.integer, "k", True), TypeError, "k: expected an int, got True"),
        (partial(check.integer, "k", 2**63), ValueError, "k: expected an int of 64 bits, got one of 64"),
        (partial(check.require, False, "k", "an even number", 3), ValueError, "k: expected an even number, got 3"),
        (partial(check.require, False, "k", "{} or {}", 3, 4, "5"), ValueError, "k: expected 4 or 5, got 3"),
        (partial(check.require_type, False, "k", "a tuple", 3), TypeError, "k: expected a tuple, got 3"),
        *(
            (partial(check.pair, "x", x), TypeError, r"x: expected a pair \(data, sf\)")
            for x in (None, "ab", (1, 2, 3))
        ),
        *((partial(check.number, "eps", x), TypeError, "eps: expected a number") for x in ("1", None, True)),
        *((partial(check.number, "eps", float(x)), ValueError, "expected a finite number") for x in ("nan", "inf")),
        *((partial(check.number, "eps", x), ValueError, "a finite number of float32") for x in (1e300, 10**400)),
        (partial(check.number, "eps", -1e-9, at_least=0), ValueError, "eps: expected at least 0"),
        *((partial(check.flag, "x", x), TypeError, "x: expected a bool") for x in (0, 1, None, "True", [True])),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_is_right_passes() -> None:
    check.multiple_of("n", 8, 4)
    check.one_of("fmt", "a", ("a", "b"))
    check.in_range("k", 1, 1, 8)
    check.in_range("k", 8, 1, 8)
    check.require(True, "k", "", None)
    check.require_type(True, "k", "", None)
    assert check.pair("x", [1, 2]) == (1, 2)
    check.flag("round_sf", True)
    check.integer("repeat", 2**63 - 1)
    for value in (0, -1, 2.5, 1e30):
        check.number("eps", value)
        check.number("eps", abs(value), at_least=0)


def test_row_alignment() -> None:
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert x.data_ptr() % 16 == 0
    assert check.row_alignment(x) == 16
    assert check.row_alignment(x[:, 1:]) == 2
    assert check.row_alignment(x[:, 2:]) == 4
    assert check.row_alignment(x[:, 8:]) == 16
    assert check.row_alignment(torch.zeros(8, 66, dtype=torch.bfloat16)) == 4
    assert check.row_alignment(torch.zeros(8, 65, dtype=torch.uint8)[:, :64]) == 1
    assert check.row_alignment(torch.zeros(2, 3, 60, dtype=torch.bfloat16)) == 8


def test_empty_tensors_have_any_strides() -> None:
    for layout in ("contiguous", "rows"):
        for strides in ((1, 0), (16, 2), (0, 0)):
            empty = torch.empty_strided((0, 8), strides)
            assert check.tensor("x", empty, (torch.float32,), ("n", 8), layout=layout) == (0, 8)


@pytest.mark.gpu
def test_values_are_not_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    indices = torch.tensor([5], device="cuda")
    with pytest.raises(ValueError, match="indices"):
        check.below("indices", indices, 5, "indices below 5")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert not check.reads_data(indices)
        check.below("indices", indices, 5, "indices below 5")


def test_ends_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.tensor([3, 3, 6, 7])
    check.ends("ends", wrong, 4)
    monkeypatch.setattr(env, "debug", lambda: True)
    check.ends("ends", torch.tensor([3, 4, 4, 9]), 4)
    check.ends("ends", wrong, 1)
    with pytest.raises(ValueError, match=r"^ends\[1\]: expected at least 4, where the segment begins, got 3$"):
        check.ends("ends", wrong, 4)


def test_values_are_read_in_debug_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for debug in (False, True):
        monkeypatch.setattr(env, "debug", lambda debug=debug: debug)
        assert check.reads_data(torch.zeros(1)) is debug
        assert not check.reads_data(torch.zeros(1, device="meta"))
        with FakeTensorMode():
            assert not check.reads_data(torch.zeros(1))


def test_an_error_under_torch_compile_has_numbers_for_open_sizes() -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (size,) = check.tensor("x", x, _FLOATS, ("size",))
        check.tensor("y", y, _FLOATS, (size,))
        check.require(size != 147, "x", "not {} elements", (size,), size)
        return x + y

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"y: expected shape \(24\), got \(147,\)"):
        compiled(torch.zeros(24), torch.zeros(147))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"x: expected not 147 elements, got \(147,\)"):
        compiled(torch.zeros(147), torch.zeros(147))
