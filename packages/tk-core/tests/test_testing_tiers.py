"""tk_core.testing.tiers: what the tests of every op notice."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_core.arch import Arch, get_arch
from tk_core.kernel import Kernel, kernel
from tk_core.testing import Case, OpSpec, assert_equal, tiers


def make(device: str) -> dict[str, Any]:
    return {"x": torch.randn(4, 8, device=device)[:, :6]}


def double(x: torch.Tensor) -> torch.Tensor:
    """2·x."""
    out = x.new_empty(x.shape)
    torch.ops.tk_test_tiers.double_out(x, out)
    return out


def double_reference(x: torch.Tensor) -> torch.Tensor:
    return (x + x).contiguous()


def no_out(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape) + x + x


def changes_gap(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((1,), (1,), 7).add_(1)
    return double(x)


def forgets_last(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    out[:-1] = 2 * x[:-1]
    return out


def wrong_strides_on_meta(x: torch.Tensor) -> torch.Tensor:
    return double(x) if x.device.type == "cpu" else x.new_empty(x.shape[::-1]).t()


def breaks_graph(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return double(x)


def add_in_place(x: torch.Tensor) -> None:
    """x + 1, in place."""
    x.add_(1)


def add_in_place_reference(x: torch.Tensor) -> None:
    x.copy_(x + 1)


@pytest.fixture(scope="module", autouse=True)
def _operator() -> Any:
    library = torch.library.Library("tk_test_tiers", "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define("double_out(Tensor x, Tensor(a!) out) -> ()", tags=tags)
    library.impl("double_out", lambda x, out: (out.copy_(x + x), None)[1], "CPU")
    library.impl("double_out", lambda x, out: None, "Meta")
    yield library
    library._destroy()


def spec_of(op: Callable[..., Any], reference: Callable[..., Any] = double_reference, **more: Any) -> OpSpec:
    return OpSpec(op, reference, (Case("one", make, small=True, modes=True), Case("big", make)), **more)


def params_of(spec: OpSpec) -> list[Any]:
    (mark,) = tiers.tests(spec).pytestmark
    return mark.args[1]


def checks_of(spec: OpSpec, tier: str = "cpu") -> dict[str, Callable[[], None]]:
    params = {param.id: param.values[0] for param in params_of(spec)}
    return {name.removeprefix(f"{tier}-"): check for name, check in params.items() if name.startswith(f"{tier}-")}


@pytest.mark.parametrize(
    "spec", [spec_of(double), spec_of(add_in_place, add_in_place_reference, mutates=("x",))], ids=["out", "in place"]
)
def test_a_good_op_passes_all(spec: OpSpec) -> None:
    checks = checks_of(spec)
    assert list(checks) == ["spec", "cases", "torch-compile"]
    for check in checks.values():
        check()


@pytest.mark.parametrize(
    ("op", "check", "message"),
    [
        (changes_gap, "cases", "x: input was changed"),
        (forgets_last, "cases", r"6 of 24 elements differ .* the first at \(3, 0\): got nan \(0xffffffff\)"),
        (wrong_strides_on_meta, "cases", r"result on meta tensors, tensor 0: expected strides \(6, 1\), got \(1, 4\)"),
        (no_out, "spec", "expected a docstring"),
        (lambda x, y=0: x, "spec", "expected the reference's signature"),
    ],
)
def test_what_is_noticed(op: Callable[..., Any], check: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        checks_of(spec_of(op))[check]()


def test_graph_breaks_are_noticed() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        checks_of(spec_of(breaks_graph))["torch-compile"]()


def test_a_spec_needs_a_small_case_for_every_mode() -> None:
    spec = OpSpec(double, double_reference, (Case("one", make, small=True), Case("big", make, modes=True)))
    with pytest.raises(AssertionError, match="expected a small case with modes=True"):
        checks_of(spec)["spec"]()


def test_a_maker_whose_meta_tensors_differ() -> None:
    case = Case("one", lambda device: {"x": torch.ones(2 if device == "meta" else 3, device=device)}, small=True)
    spec = OpSpec(double, double_reference, (case,))
    with pytest.raises(AssertionError, match=r"made on meta, tensor 0: expected shape \(3,\), got \(2,\)"):
        checks_of(spec)["cases"]()


def test_a_compile_case_without_a_kernel() -> None:
    spec = OpSpec(double, double_reference, (Case("one", make, compile=True),))
    checks = checks_of(spec, "compile")
    assert list(checks) == ["one"]
    with pytest.raises(AssertionError, match="one: expected a kernel, saw none launched"):
        checks["one"]()


@kernel
def _fill_kernel(size: int, body: str, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def fill(out: T.Tensor((size,), "int32")) -> None:
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            if body == "refused":
                out[lane] = T.call_extern("int32", "tk_no_such_function", lane)
            elif body == "local":
                values = T.alloc_local((32,), "int32")
                for i in T.serial(32):
                    values[i] = out[i * 32 + lane]
                for i in T.serial(32):
                    out[i * 32 + lane] = values[out[i * 32 + lane] % 32]
            else:
                out[lane] = size

    return fill


def fill(out: torch.Tensor, body: str = "good") -> None:
    if out.numel() == 0:
        return
    _fill_kernel(out.numel(), body, get_arch(out.device))(out)


def fill_case(size: int, body: str = "good") -> Case:
    return Case(f"{body}{size}", lambda device: {"out": torch.empty(size, device=device), "body": body}, compile=True)


def test_several_cases_are_compiled_in_one_test() -> None:
    spec = OpSpec(fill, fill, tuple(fill_case(1024 + i) for i in range(25)))
    tests = list(checks_of(spec, "compile"))
    assert tests == ["good1024-and-11-more", "good1036-and-11-more", "good1048"]


def test_other_architectures_get_one_program_of_each_kernel_and_none_is_checked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowered = []

    def lower(kernel: Kernel, *args: Any, simplified: bool) -> SimpleNamespace:
        lowered.append((args[0], args[-1].name))
        return SimpleNamespace(kernel_source=str(args))

    monkeypatch.setattr(tiers, "_good", set())
    monkeypatch.setattr(tiers, "lower", lower)
    monkeypatch.setattr(tiers, "_usages", lambda requests, _: [{} for _ in requests])
    only_there = replace(fill_case(1088), archs=("sm_100a",))
    spec = OpSpec(fill, fill, (fill_case(1024), fill_case(1056), only_there), archs=("sm_90a", "sm_100a"))
    (test,) = checks_of(spec, "compile").values()
    test()
    assert lowered == [(1024, "sm_90a"), (1056, "sm_90a"), (1088, "sm_100a")]
    tiers.check_other_architectures([spec, spec])
    assert lowered[3:] == [(1024, "sm_100a")]
    test()
    assert len(lowered) == 4


@pytest.mark.compile
def test_one_bad_kernel_among_good_ones_is_noticed() -> None:
    def check(*cases: Case) -> None:
        tiers._good.clear()
        (test,) = checks_of(OpSpec(fill, fill, cases), "compile").values()
        test()

    check(fill_case(1024), fill_case(1056))
    with pytest.raises(AssertionError, match=r"_fill_kernel\(1024, 'local', sm_90a\), fill_kernel: expected no local"):
        check(fill_case(1056), fill_case(1024, "local"), fill_case(1088))
    with pytest.raises(RuntimeError, match=r'"tk_no_such_function" is undefined'):
        check(fill_case(1056), fill_case(1024, "refused"), fill_case(1088))
    with pytest.raises(AssertionError, match="small: expected a kernel, saw none launched"):
        check(fill_case(1056), Case("small", lambda device: {"out": torch.empty(0)}, compile=True))


def test_what_no_call_writes_is_left_out() -> None:
    def results(unwritten: float) -> tuple[torch.Tensor, ...]:
        column_major = torch.full((4, 3), 2.0).t().contiguous().t()
        column_major[1] = unwritten
        return column_major, torch.tensor([3, 255], dtype=torch.uint8)

    eager, compiled = results(0.0), results(5.0)
    eager[0].view(torch.int32)[1] = -1
    tiers._leave_out_unwritten(compiled, eager)
    assert_equal(compiled, eager)
    different = results(5.0)
    different[0][3, 2] = 4.0
    tiers._leave_out_unwritten(different, eager)
    with pytest.raises(AssertionError, match=r"result\[0\]: 1 of 12 elements differ"):
        assert_equal(different, eager)


def test_names_of_gpu_tests() -> None:
    names = {"gpu-one", "gpu-big", "modes-stream-one", "modes-torch-compile-one", "modes-graph-one"}
    assert tiers.gpu_test_names(spec_of(double)) == names
    marks = {param.id: {mark.name: mark.kwargs for mark in param.marks} for param in params_of(spec_of(double))}
    assert names <= {name for name, of_test in marks.items() if "gpu" in of_test}
    assert all(of_test["tk_case"] == {"op": spec_of(double).name, "test": name} for name, of_test in marks.items())


def test_a_failure_names_its_case() -> None:
    with pytest.raises(AssertionError) as error:
        checks_of(spec_of(forgets_last))["cases"]()
    assert error.value.__notes__ == ["in case one"]
