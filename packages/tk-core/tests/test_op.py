"""@op: registration, backends, and the ways of a call."""

import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tk_core
from tk_core import env, serving
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.op import given_or_new, launching, new, op
from tk_core.serving import uses_reference

launches: list[str] = []


class _Reference:
    """The module tk_core_tests.reference, in which the ops of this file have their references."""

    @staticmethod
    def scale(x: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        launches.append("reference")
        return x * factor if out is None else out.copy_(x * factor)

    modern = scale
    strict = scale

    @staticmethod
    def count(x: Tensor) -> Tensor:
        return torch.tensor([x.numel()], dtype=torch.int32)

    @staticmethod
    def square(x: Tensor) -> Tensor:
        return x @ x

    @staticmethod
    def sums(x: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        return [x + other for other in others]

    @staticmethod
    def dequantize(
        x: Tensor | tuple[Tensor, Tensor],
        sizes: tuple[int, int],
        with_max: bool = False,
        *,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        values = x if isinstance(x, Tensor) else x[0] * x[1]
        if total is not None:
            total += values.sum()
        return values * sizes[1], values.max() if with_max else None

    @staticmethod
    def swapped(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


sys.modules["tk_core_tests"] = types.ModuleType("tk_core_tests")
sys.modules["tk_core_tests"].__spec__ = importlib.machinery.ModuleSpec("tk_core_tests", None)
sys.modules["tk_core_tests"].__all__ = []
sys.modules["tk_core_tests.reference"] = _Reference  # type: ignore[assignment]


def op_here(**options: Any) -> Any:
    """`@op` for a function of the package tk_core_tests."""

    def decorate(function: Any) -> Any:
        function.__module__ = "tk_core_tests.ops"
        return op(**options)(function)

    return decorate


@op_here(writes=("out",))
def scale(x: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """Multiply by a factor."""
    if x.ndim != 1:
        raise ValueError(f"x: expected one dimension, got {x.ndim}")
    out = given_or_new("out", out, x, x.shape)
    if launching(out):
        launches.append("kernel")
        if not out.is_meta:
            out.copy_(x * factor)
    return out


@op_here(min_sm=90)
def modern(x: Tensor, factor: float) -> Tensor:
    out = new(x.new_empty, x.shape)
    if launching(out):
        launches.append("kernel")
    return out


@op_here()
def count(x: Tensor) -> Tensor:
    return new(x.new_empty, (1,), dtype=torch.int32)


@op_here()
def square(x: Tensor) -> Tensor:
    return new(torch.empty_like, x)


@op_here()
def sums(x: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    return [new(torch.empty_like, x) for _ in others]


@op_here(writes=("total",))
def dequantize(
    x: Tensor | tuple[Tensor, Tensor], sizes: tuple[int, int], with_max: bool = False, *, total: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    data = x if isinstance(x, Tensor) else x[0]
    return new(torch.empty_like, data), new(data.new_empty, ()) if with_max else None


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    launches.clear()
    yield
    launches.clear()


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve CPU tensors, as if these were on a GPU."""
    monkeypatch.setattr(serving, "uses_reference", lambda _: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    for function in (scale, modern):
        monkeypatch.setattr(function.op, "_ready_devices", {torch.device("cpu")})


def test_cpu_runs_the_reference() -> None:
    x = torch.arange(4.0)
    assert torch.equal(scale(x, 3.0), x * 3)
    out = torch.empty(4)
    assert scale(x, 2.0, out=out) is out
    assert torch.equal(out, x * 2)
    assert launches == ["reference"] * 2


def test_the_function_is_the_public_one() -> None:
    assert (scale.__name__, scale.__doc__) == ("scale", "Multiply by a factor.")
    with pytest.raises(TypeError, match=r"scale\(\) missing 1 required positional argument: 'factor'"):
        scale(torch.ones(2))
    with pytest.raises(ValueError, match="x: expected one dimension"):
        scale(torch.ones(2, 2), 1.0)
    assert launches == []


@pytest.mark.parametrize(
    ("function", "schema"),
    [
        (scale, "Tensor x, float factor, Tensor(a2!)? out"),
        (sums, "Tensor x, Tensor[] others"),
        (dequantize, "Tensor x_0, Tensor? x_1, SymInt[] sizes, bool with_max, Tensor(a4!)? total"),
    ],
)
def test_registered_with_torch(function: Any, schema: str) -> None:
    expected = f"tk_core_tests::{function.__name__}({schema}, Tensor(results!)[] results) -> ()"
    assert str(function.op.operator.overload._schema) == expected


def test_opcheck() -> None:
    x = torch.arange(4.0)
    torch.library.opcheck(torch.ops.tk_core_tests.scale.default, (x, 2.0, None, [torch.zeros(4)]))
    torch.library.opcheck(torch.ops.tk_core_tests.scale.default, (x, 2.0, torch.zeros(4), []))
    torch.library.opcheck(torch.ops.tk_core_tests.sums.default, (x, [x, x], [torch.zeros(4), torch.zeros(4)]))


@pytest.mark.parametrize("annotation", [Any, complex, list[str], int | str])
def test_an_argument_that_torch_lacks_is_refused(annotation: Any) -> None:
    def function(x: Tensor, other: annotation) -> Tensor:
        return x

    with pytest.raises((TypeError, ValueError)):
        op_here()(function)


def test_compiles_into_one_graph() -> None:
    x, out = torch.arange(4.0), torch.empty(4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor, factor: float, out: Tensor) -> Tensor:
        return scale(scale(x, factor) + 1, 2.0, out)

    assert torch.equal(compiled(x, 3.0, out), (x * 3 + 1) * 2)
    assert torch.equal(out, (x * 3 + 1) * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_pairs_results_by_flags_and_arguments_in_place(compiled: bool) -> None:
    call = torch.compile(dequantize, fullgraph=True, backend="aot_eager") if compiled else dequantize
    x, total = torch.arange(4.0), torch.zeros(())
    values, largest = call((x, x), (1, 2), True, total=total)
    assert (values.tolist(), largest.item(), total.item()) == ([0.0, 2.0, 8.0, 18.0], 9.0, 14.0)
    values, largest = call(x, (1, 3))
    assert (values.tolist(), largest) == ([0.0, 3.0, 6.0, 9.0], None)


@pytest.mark.parametrize("compiled", [False, True])
def test_builds_no_autograd_graph(compiled: bool) -> None:
    function = torch.compile(scale, fullgraph=True, backend="aot_eager") if compiled else scale
    for x in (torch.arange(4.0, requires_grad=True), torch.nn.Parameter(torch.arange(4.0))):
        out = function(x, 3.0)
        assert torch.equal(out, x.detach() * 3)
        assert not out.requires_grad
        assert out.grad_fn is None


@pytest.fixture
def _debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TK_DEBUG", "1")
    env.debug.cache_clear()
    yield
    monkeypatch.undo()
    env.debug.cache_clear()


@pytest.mark.usefixtures("_debug")
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_debug_raises_where_a_gradient_would_be_dropped(on_a_gpu: bool, request: pytest.FixtureRequest) -> None:
    if on_a_gpu:
        request.getfixturevalue("_on_a_gpu")
    for x in (torch.arange(4.0, requires_grad=True), torch.nn.Parameter(torch.arange(4.0))):
        with pytest.raises(RuntimeError, match=r"tk_core_tests.scale: drops the gradient of x; .*detach"):
            scale(x, 3.0)
        # Nothing is dropped where no gradient is wanted.
        with torch.no_grad():
            assert torch.equal(scale(x, 3.0), x * 3)
        assert torch.equal(scale(x.detach(), 3.0), x.detach() * 3)
    assert launches == ["kernel" if on_a_gpu else "reference"] * 4


@pytest.mark.usefixtures("_debug")
def test_debug_lets_a_count_drop_gradients() -> None:
    assert count(torch.arange(4.0, requires_grad=True)).item() == 4
    with pytest.raises(RuntimeError, match=r"tk_core_tests.sums: drops the gradient of others\[0\]"):
        sums(torch.arange(4.0), [torch.arange(4.0, requires_grad=True)])


@pytest.mark.usefixtures("_debug")
def test_debug_names_what_computes_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    import tk_mhc

    streams, mix = torch.randn(2, 4, 64).bfloat16().requires_grad_(), torch.rand(2, 4, 1)
    modeling = types.ModuleType("tk_modeling")
    modeling.__spec__ = importlib.machinery.ModuleSpec("tk_modeling", None)
    monkeypatch.setitem(sys.modules, "tk_modeling", modeling)
    modeling.__all__ = []
    with pytest.raises(RuntimeError, match=r"the gradient of x; tk_mhc.mhc_pre_apply_mix_bwd computes it$"):
        tk_mhc.mhc_pre_apply_mix(streams, mix)
    modeling.__all__ = ["mhc_pre_apply_mix"]
    # A package's own function under another name would send the reader in a circle.
    modeling.mhc_pre_apply_mix = tk_mhc.mhc_pre_apply_mix
    with pytest.raises(RuntimeError, match=r"the gradient of x; tk_mhc.mhc_pre_apply_mix_bwd computes it$"):
        tk_mhc.mhc_pre_apply_mix(streams, mix)
    modeling.mhc_pre_apply_mix = lambda: None
    with pytest.raises(RuntimeError, match=r"the gradient of x; tk_modeling.mhc_pre_apply_mix is differentiable$"):
        tk_mhc.mhc_pre_apply_mix(streams, mix)


@pytest.mark.usefixtures("_debug")
def test_debug_takes_ops_in_an_autograd_function() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return scale(x, 3.0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return scale(grad, 3.0)

    x = torch.arange(4.0, requires_grad=True)
    Scale.apply(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_changes_no_bit(device: str, compiled: bool) -> None:
    x = torch.randn(8, 8, device=device)
    run = torch.compile(square, fullgraph=True, backend="aot_eager") if compiled else square
    with serving.backend("reference"), torch.autocast(device, torch.bfloat16):
        found = run(x)
        assert (x @ x).dtype == torch.bfloat16
    assert torch.equal(found, x @ x)


def test_fake_and_meta_tensors_launch_nothing() -> None:
    assert scale(torch.empty(4, device="meta"), 2.0).device.type == "meta"
    with FakeTensorMode():
        assert scale(torch.empty(4, device="cuda"), 2.0).shape == (4,)
    assert launches == []


class _Wrapped(torch.Tensor):
    pass


class _Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += func.namespace == "tk_core_tests"


def test_subclasses_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert torch.equal(scale(parameter, 2.0), torch.full((2,), 2.0))
    assert torch.equal(scale(torch.ones(2).as_subclass(_Wrapped), 2.0), torch.full((2,), 2.0))


@pytest.mark.usefixtures("_on_a_gpu")
def test_subclasses_go_through_the_dispatcher() -> None:
    counted = torch.Tensor._make_subclass(_Counted, torch.ones(4))
    sums(torch.ones(4), [counted])
    scale(torch.ones(4), 2.0, out=counted)
    dequantize((torch.ones(4), counted), (1, 2))
    assert _Counted.calls == 3


def test_capture_takes_the_kernel_path() -> None:
    with capture(arch_from_name("sm_90a")):
        scale(torch.empty(4, device="meta"), 2.0)
        scale(torch.empty(0, device="meta"), 2.0)
    assert launches == ["kernel"]


def test_unsupported_arch_is_named_before_anything_runs() -> None:
    message = "tk_core_tests.modern: found sm_80, needs sm_90 or newer"
    with capture(arch_from_name("sm_80")), pytest.raises(UnsupportedArchError, match=message):
        modern(torch.empty(2, device="meta"), 2.0)
    assert launches == []


def test_backend() -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert uses_reference(cpu)
    assert not uses_reference(cuda)
    with tk_core.backend("reference"):
        assert uses_reference(cuda)
        with tk_core.backend("kernel"):
            assert not uses_reference(cuda)
            assert uses_reference(cpu)
        assert uses_reference(cuda)
    assert not uses_reference(cuda)
    with (
        pytest.raises(ValueError, match="backend: expected 'kernel' or 'reference', got 'fast'"),
        tk_core.backend("fast"),
    ):
        pass


def test_backend_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TK_BACKEND", "reference")
    env.default_backend.cache_clear()
    try:
        assert uses_reference(torch.device("cuda", 0))
        monkeypatch.setenv("TK_BACKEND", "quick")
        env.default_backend.cache_clear()
        with pytest.raises(ValueError, match="TK_BACKEND: expected 'kernel' or 'reference', got 'quick'"):
            uses_reference(torch.device("cuda", 0))
    finally:
        monkeypatch.undo()
        env.default_backend.cache_clear()


@op_here()
def swapped(x: Tensor) -> tuple[Tensor, Tensor]:
    second, first = new(x.new_empty, x.shape), new(x.new_empty, x.shape)
    return first, second


def test_results_are_made_in_the_order_in_which_they_are_returned() -> None:
    with pytest.raises(AssertionError, match=r"tk_core_tests.swapped: makes its results in another order"):
        swapped(torch.ones(2))


# ---- what a call does where kernels serve it


@pytest.mark.usefixtures("_on_a_gpu")
def test_nothing_is_launched_for_empty_results() -> None:
    assert scale(torch.empty(0), 2.0).shape == (0,)
    assert launches == []


@pytest.mark.parametrize(
    ("out", "error", "expected"),
    [
        (torch.empty(4, dtype=torch.float64), TypeError, "torch.float32"),
        (torch.empty(3), ValueError, r"shape \(4\)"),
        (torch.empty(8)[::2], ValueError, "contiguous"),
        (torch.empty(4, device="meta"), ValueError, "cpu"),
    ],
)
def test_a_given_result_must_fit(out: Tensor, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=f"^out: expected .*{expected}"):
        scale(torch.ones(4), 2.0, out)


@pytest.mark.usefixtures("_on_a_gpu")
def test_the_operator_writes_the_results_that_it_is_given() -> None:
    x, out, result = torch.arange(4.0), torch.empty(4), torch.empty(4)
    scale.op._serve_given(x, 2.0, None, result)
    scale.op._serve_given(x, 3.0, out)
    assert (result.tolist(), out.tolist()) == ((x * 2).tolist(), (x * 3).tolist())
    unaligned = torch.zeros(5)[1:]
    scale.op._serve_given(x, 2.0, None, unaligned)
    assert torch.equal(unaligned, result)
    assert launches == ["kernel"] * 3


@pytest.mark.usefixtures("_on_a_gpu")
def test_unaligned_arguments_are_copied_and_copied_back() -> None:
    memory, target = torch.arange(9.0), torch.zeros(9)
    x, out = memory[1:], target[1:]
    assert x.data_ptr() % 16
    seen: list[Tensor] = []

    def look(x: Tensor, out: Tensor, other: Tensor) -> Tensor:
        seen.extend((x, out, other))
        if launching(out):
            out.copy_(x * 2)
        return out

    look.__module__ = "tk_core_tests.ops"
    look = op(writes=("out",), aligned=("x", "out"), reference="scale")(look)
    look.op._ready_devices.add(torch.device("cpu"))
    assert look(x, out, x) is out
    assert torch.equal(out, x * 2)
    assert [y.data_ptr() % 16 == 0 for y in seen] == [True, True, False]
    with pytest.raises(ValueError, match="out: expected memory of its own, got some of x"):
        look(x, memory[2:], x)
    columns = memory.as_strided((3, 2), (1, 4), 1)  # with a gap between them
    repeated = torch.arange(2.0)[1:].expand(3, 2)
    look(repeated, columns, repeated)
    assert [y.stride() for y in seen[-3:]] == [(2, 1), (1, 4), (0, 0)]
    assert memory.tolist() == [0, 2, 2, 2, 4, 2, 2, 2, 8]
    with capture(arch_from_name("sm_90a")):
        look(*[torch.empty(9, device="meta")[1:]] * 3)
    assert [y.data_ptr() % 16 == 0 for y in seen[-3:]] == [True, True, False]


@pytest.mark.usefixtures("_on_a_gpu")
def test_any_stride_of_a_single_row_is_taken() -> None:
    def strict(x: Tensor | tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        if launching(out):
            launches.append("kernel")
            for tensor in (*((x,) if isinstance(x, Tensor) else x), out):
                if tensor.stride() != torch.empty(tensor.shape).stride():
                    raise RuntimeError("strides[0] violates packed ABI constraint")
            out.copy_(x if isinstance(x, Tensor) else x[0])
        return out

    strict.__module__ = "tk_core_tests.ops"
    strict = op(writes=("out",))(strict)
    strict.op._ready_devices.add(torch.device("cpu"))
    row = torch.arange(12.0).view(3, 4)[1:2, :2]
    assert row.is_contiguous()
    assert row.stride() == (4, 1)
    for x in (row, (row, row)):
        out = torch.arange(12.0).view(3, 4)[1:2, :2].fill_(0)
        assert strict(x, out) is out
        assert out.tolist() == [[4.0, 5.0]]
    assert launches == ["kernel"] * 4
    with pytest.raises(RuntimeError, match="violates"):
        strict(torch.zeros(4, 4)[:, :2], torch.empty(4, 2))


@pytest.mark.gpu
def test_a_single_row_of_a_wider_tensor_on_a_gpu() -> None:
    import tk_moe

    scores = torch.randn(4, 64, device="cuda")[1:2, :32]
    assert scores.stride() == (64, 1)
    for _ in range(2):
        assert torch.equal(tk_moe.topk_gate(scores, 4), scores.sort(descending=True, stable=True).indices[:, :4])


@pytest.mark.gpu
def test_backend_on_a_gpu() -> None:
    x = torch.arange(4.0, device="cuda")
    scale(x, 2.0)
    with tk_core.backend("reference"):
        assert torch.equal(scale(x, 2.0), x * 2)
    scale(x, 2.0)
    assert launches == ["kernel", "reference", "kernel"]


@pytest.mark.gpu
def test_compiled_calls_on_a_gpu_launch_kernels() -> None:
    x = torch.arange(4.0, device="cuda")
    compiled = torch.compile(lambda x: scale(x, 3.0) + 1, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), x * 3 + 1)
    assert launches == ["kernel"] * 3
