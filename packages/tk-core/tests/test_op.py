"""@op: registration, backends and the ways through the dispatcher."""

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tk_core
from tk_core import op as op_module
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import capture
from tk_core.op import op, uses_reference

launches: list[str] = []


def _double_reference(x: torch.Tensor, factor: int, out: torch.Tensor) -> None:
    launches.append("reference")
    out.copy_(x * factor)


@op("tk_core_tests::scale_out", mutates=("out",), reference=_double_reference)
def _scale_out(x: torch.Tensor, factor: int, out: torch.Tensor) -> None:
    """Multiply by a factor."""
    launches.append("kernel")


@op("tk_core_tests::modern_out", mutates=("out",), reference=_double_reference, min_sm=90)
def _modern_out(x: torch.Tensor, factor: int, out: torch.Tensor) -> None:
    launches.append("kernel")


def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
    out = torch.empty_like(x)
    _scale_out(x, factor, out)
    return out


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    launches.clear()
    yield
    launches.clear()


def test_cpu_runs_the_reference() -> None:
    x = torch.arange(4.0)
    assert torch.equal(scale(x, 3), x * 3)
    assert launches == ["reference"]


def test_registered_with_torch() -> None:
    overload = torch.ops.tk_core_tests.scale_out.default
    assert str(overload._schema) == "tk_core_tests::scale_out(Tensor x, SymInt factor, Tensor(a2!) out) -> ()"
    torch.library.opcheck(overload, (torch.arange(4.0), 2, torch.zeros(4)))
    assert _scale_out.__doc__ == "Multiply by a factor."


def test_compiles_into_one_graph() -> None:
    x = torch.arange(4.0)
    compiled = torch.compile(lambda x: scale(scale(x, 3) + 1, 2), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), (x * 3 + 1) * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_builds_no_autograd_graph(compiled: bool) -> None:
    function = torch.compile(scale, fullgraph=True, backend="aot_eager") if compiled else scale
    for x in (torch.arange(4.0, requires_grad=True), torch.nn.Parameter(torch.arange(4.0))):
        out = function(x, 3)
        assert torch.equal(out, x.detach() * 3)
        assert not out.requires_grad
        assert out.grad_fn is None


@pytest.fixture
def _debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TK_DEBUG", "1")
    op_module.env.debug.cache_clear()
    yield
    monkeypatch.undo()
    op_module.env.debug.cache_clear()


def _count_reference(x: torch.Tensor, out: torch.Tensor) -> None:
    out.fill_(x.numel())


@op("tk_core_tests::count_out", mutates=("out",), reference=_count_reference)
def _count_out(x: torch.Tensor, out: torch.Tensor) -> None:
    raise AssertionError("no kernel")


@pytest.mark.usefixtures("_debug")
def test_debug_raises_where_a_gradient_would_be_dropped() -> None:
    weights = (torch.arange(4.0, requires_grad=True), torch.nn.Parameter(torch.arange(4.0)))
    for x in weights:
        with pytest.raises(RuntimeError, match=r"tk_core_tests.scale: drops the gradient of x; .*detach"):
            scale(x, 3)
        with pytest.raises(RuntimeError, match=r"tk_core_tests.sums: drops the gradient of others\[0\]"):
            sums(torch.arange(4.0), [x])
        # Nothing is dropped where no gradient is wanted, or where the output is a count.
        with torch.no_grad():
            assert torch.equal(scale(x, 3), x * 3)
        assert torch.equal(scale(x.detach(), 3), x.detach() * 3)
        count = torch.empty(1, dtype=torch.int32)
        _count_out(x, count)
        assert count.item() == 4
    assert launches == ["reference"] * 4


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
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return scale(x, 3)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return scale(grad, 3)

    x = torch.arange(4.0, requires_grad=True)
    Scale.apply(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 4


def _square_reference(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x @ x)


@op("tk_core_tests::square_out", mutates=("out",), reference=_square_reference)
def _square_out(x: torch.Tensor, out: torch.Tensor) -> None:
    raise AssertionError("no kernel")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_changes_no_bit(device: str, compiled: bool) -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _square_out(x, out)
        return out

    x = torch.randn(8, 8, device=device)
    run = torch.compile(square, fullgraph=True, backend="aot_eager") if compiled else square
    with op_module.backend("reference"), torch.autocast(device, torch.bfloat16):
        found = run(x)
        assert (x @ x).dtype == torch.bfloat16
    assert torch.equal(found, x @ x)


def test_fake_and_meta_tensors_launch_nothing() -> None:
    assert scale(torch.empty(4, device="meta"), 2).device.type == "meta"
    with FakeTensorMode():
        assert scale(torch.empty(4, device="cuda"), 2).shape == (4,)
    assert launches == []


class _Wrapped(torch.Tensor):
    pass


def test_subclasses_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert torch.equal(scale(parameter, 2), torch.full((2,), 2.0))
    wrapped = torch.ones(2).as_subclass(_Wrapped)
    out = torch.empty(2)
    _scale_out(wrapped, 2, out)
    assert torch.equal(out, torch.full((2,), 2.0))


def test_capture_takes_the_kernel_path() -> None:
    with capture(arch_from_name("sm_90a")):
        scale(torch.empty(4, device="meta"), 2)
    assert launches == ["kernel"]


def test_unsupported_arch_is_named_before_anything_runs() -> None:
    x, out = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    message = "tk_core_tests::modern_out: found sm_80, needs sm_90 or newer"
    with capture(arch_from_name("sm_80")), pytest.raises(UnsupportedArchError, match=message):
        _modern_out(x, 2, out)
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
    op_module.env.default_backend.cache_clear()
    try:
        assert uses_reference(torch.device("cuda", 0))
        monkeypatch.setenv("TK_BACKEND", "quick")
        op_module.env.default_backend.cache_clear()
        with pytest.raises(ValueError, match="TK_BACKEND: expected 'kernel' or 'reference', got 'quick'"):
            uses_reference(torch.device("cuda", 0))
    finally:
        monkeypatch.undo()
        op_module.env.default_backend.cache_clear()


def _strict_launch(x: torch.Tensor, out: torch.Tensor) -> None:
    launches.append("kernel")
    for tensor in (x, out):
        if tensor.stride() != torch.empty(tensor.shape).stride():
            raise RuntimeError("strides[0] violates packed ABI constraint")
    out.copy_(x)


def test_any_stride_of_a_single_row_is_taken() -> None:
    strict = op("tk_core_tests::strict_out", mutates=("out",), reference=_strict_launch)(_strict_launch)
    row = torch.arange(12.0).view(3, 4)[1:2, :2]
    assert row.is_contiguous()
    assert row.stride() == (4, 1)
    out = torch.empty(1, 2)
    strict._launch((row, out))
    assert out.tolist() == [[4.0, 5.0]]
    assert launches == ["kernel", "kernel"]
    with pytest.raises(RuntimeError, match="violates"):
        strict._launch((torch.zeros(4, 4)[:, :2], torch.empty(4, 2)))


def _sums_reference(x: torch.Tensor, others: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    launches.append("reference")
    for other, out in zip(others, outs, strict=True):
        out.copy_(x + other)


@op("tk_core_tests::sums_out", mutates=("outs",), reference=_sums_reference)
def _sums_out(x: torch.Tensor, others: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    launches.append("kernel")


def sums(x: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
    outs = [torch.empty_like(x) for _ in others]
    _sums_out(x, others, outs)
    return outs


def test_lists_of_tensors() -> None:
    overload = torch.ops.tk_core_tests.sums_out.default
    schema = "tk_core_tests::sums_out(Tensor x, Tensor[] others, Tensor(a2!)[] outs) -> ()"
    assert str(overload._schema) == schema
    x, others = torch.arange(4.0), [torch.ones(4), torch.full((4,), 2.0)]
    torch.library.opcheck(overload, (x, others, [torch.zeros(4), torch.zeros(4)]))
    compiled = torch.compile(sums, fullgraph=True, backend="aot_eager")
    for got in (sums(x, others), compiled(x, others)):
        assert [y.tolist() for y in got] == [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    assert sums(x, []) == []


@op(
    "tk_core_tests::split_out",
    mutates=("parts", "count", "workspace"),
    reference=lambda x, size, workspace: (x.split(size), None, workspace.fill_(7)),
    translate=lambda call: {"size": call.width},
)
def _split_out(
    x: torch.Tensor, width: int, parts: list[torch.Tensor], count: torch.Tensor | None, workspace: torch.Tensor
) -> None:
    raise AssertionError("no kernel")


def test_results_of_the_reference_are_copied_in_order() -> None:
    parts, count, workspace = [torch.zeros(2), torch.zeros(2)], torch.ones(1), torch.zeros(1)
    _split_out(torch.arange(4.0), 2, parts, count, workspace)
    assert [part.tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0]]
    assert (count.item(), workspace.item()) == (1, 7)
    _split_out(torch.arange(4.0), 2, parts, None, workspace)


def test_a_reference_is_found_by_its_name() -> None:
    def launch(x: torch.Tensor, n: int, out: torch.Tensor) -> None:
        raise AssertionError("no kernel")

    launch.__module__ = "tk_moe.gate.gate"
    for number, reference in enumerate(("topk_gate", "gate.gate.topk_gate")):
        translate = {"translate": lambda call: {"scores": call.x, "num_topk": call.n}}
        found = op(f"tk_core_tests::best{number}_out", mutates=("out",), reference=reference, **translate)(launch)
        out = torch.zeros(1, 2, dtype=torch.int64)
        found(torch.tensor([[1.0, 3.0, 2.0]]), 2, out)
        assert out.tolist() == [[1, 2]]


class _Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return None


def test_subclasses_in_lists_go_through_the_dispatcher() -> None:
    plain, outs = torch.ones(4), [torch.empty(4)]
    _sums_out(plain, [plain], outs)
    assert outs[0].tolist() == [2.0] * 4
    counted = torch.Tensor._make_subclass(_Counted, torch.ones(4))
    _Counted.calls = 0
    _sums_out(plain, [counted], outs)
    assert _Counted.calls == 1


def test_any_stride_of_a_single_row_in_a_list_is_taken() -> None:
    strict = op("tk_core_tests::strict_list_out", mutates=("outs",), reference=_sums_reference)(_strict_list_launch)
    row, outs = torch.arange(12.0).view(3, 4)[1:2, :2], [torch.empty(1, 2)]
    strict._launch((torch.ones(1, 2), [row], outs))
    assert outs[0].tolist() == [[4.0, 5.0]]
    assert launches == ["kernel", "kernel"]
    with pytest.raises(RuntimeError, match="violates"):
        strict._launch((torch.ones(4, 2), [torch.zeros(4, 4)[:, :2]], [torch.empty(4, 2)]))


def _strict_list_launch(x: torch.Tensor, others: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    for other, out in zip(others, outs, strict=True):
        _strict_launch(other, out)


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
    scale(x, 2)
    with tk_core.backend("reference"):
        assert torch.equal(scale(x, 2), x * 2)
    scale(x, 2)
    assert launches == ["kernel", "reference", "kernel"]
