"""`tk warmup --model`: what profiles cover, and that a server with TK_COMPILE=forbid finds all of it."""

import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tk_core
import tk_moe
from tk_core.arch import arch_from_name
from tk_core.cli.plan import Plan, ops_called, plan_model
from tk_core.cli.profile import load, shipped
from tk_core.kernel import KernelRequest, capture
from tk_core.testing import load_specs
from tk_ep import LocalGroup

ROOT = Path(__file__).resolve().parents[1]
EVERY_OP, README_MODEL, MODELING_MODEL = (
    str(ROOT / "tests" / "profiles" / f"{name}.toml") for name in ("every-op", "readmes", "modeling")
)
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


@cache
def plan_of(name: str, arch: str = "sm_90a") -> Plan:
    model = load(name)
    called = set(ops_called(model))
    plan = plan_model(model, [arch], called)
    assert not plan.failures
    specs = load_specs()
    of_ep = {name for name in called if name.startswith("tk_ep.")}
    of_indexer = {name for name in called if name.startswith("tk_indexer.")}
    for_hopper = {name for name in called - of_ep if specs[name].archs == ("sm_90a",)} | of_indexer
    refused = {op for op, _ in plan.unsupported}
    wanted = {"sm_80": for_hopper | of_ep, "sm_90a": set(), "sm_100a": {"tk_gemm.router_gemm_nt"} & called}
    assert refused == wanted[arch]
    return plan


def missing(requests: list[KernelRequest], plan: Plan) -> list[str]:
    """Kernels that were asked for and are not planned."""
    return [str(r) for r in requests if r not in plan.jobs]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles(name: str, arch: str) -> None:
    assert len(plan_of(name, arch).jobs) > 70


def test_a_profile_can_call_every_op() -> None:
    called = set(ops_called(load(EVERY_OP)))
    ops = load_specs().keys() - {op for op in load_specs() if op.startswith("tk_modeling.")}
    assert called == ops | {f"tk_ep.{call}" for call in ("dispatch", "combine", "barrier", "copy", "fetch")}


def test_few_kernels_depend_on_the_number_of_tokens() -> None:
    model = load(EVERY_OP)
    found: dict[str, dict[int, set[KernelRequest]]] = defaultdict(lambda: defaultdict(set))
    for num_tokens in (1, 2, 3, 64, 511, 513, 4099, 20000):
        for name, op, arguments in model.calls(num_tokens):
            with capture(arch_from_name("sm_90a")) as requests:
                op(**arguments)
            found[name][num_tokens].update(requests)
    for name, by_count in found.items():
        kernels = set().union(*by_count.values())
        # Equal kernels have equal keys, or a server would load one twice.
        assert len(kernels) == len({(request.kernel.name, repr(request.args)) for request in kernels}), name
        assert len(kernels) <= 4 * max(map(len, by_count.values())), name
    changing = {name for name, by_count in found.items() if len(set(map(frozenset, by_count.values()))) > 1}
    table = (ROOT / "docs" / "warmup.md").read_text(encoding="utf-8").partition("| ops | why |")[2]
    named = set(re.findall(r"`(?:tk_\w+\.)?(\w+)`", table.partition("\n\n")[0]))
    # expand_to_fused has a second kernel only for rows wider than those here.
    assert {name.partition(".")[2] for name in changing} == named - {"expand_to_fused"}


def test_all_numbers_of_tokens_are_covered() -> None:
    """Ops that choose kernels by the number of tokens find theirs among those planned, wherever they change."""
    model = load(EVERY_OP)
    plan = plan_of(EVERY_OP)
    counts = random.Random(0).sample(range(1, model.max_tokens + 1), 4)
    for num_tokens in (*counts, 511, 513):
        for _, op, arguments in model.calls(num_tokens):
            with capture(arch_from_name("sm_90a")) as requests:
                op(**arguments)
            assert not missing(requests, plan), num_tokens


def test_a_smaller_gpu_is_covered_if_it_is_named() -> None:
    plan = plan_model(load(EVERY_OP), ["sm_90a"], {"tk_moe.get_fused_mapping", "tk_moe.group_count"}, num_sms=13)
    idx = torch.empty(500, 4, dtype=torch.int64, device="meta")
    with tk_core.num_sms(13), capture(arch_from_name("sm_90a")) as requests:
        tk_moe.get_fused_mapping(idx, 16, 0, 16)
        tk_moe.group_count(idx, 16)
    assert requests
    assert not missing(requests, plan)


def test_bf16_products_are_planned_for_blackwell() -> None:
    model = load(EVERY_OP)
    ops = {op for op in ops_called(model) if op.startswith("tk_gemm.") and "bf16" in op}
    plan = plan_model(model, ["sm_100a"], ops)
    assert not plan.failures
    assert not plan.unsupported
    names = {request.kernel.name for request in plan.jobs}
    assert names == {"tk_gemm.blackwell.bf16.bf16_product_blackwell_kernel"}
    kinds = {request.args[0] for request in plan.jobs}
    assert kinds == {"dense", "ids", "psum", "masked", "k"}


def test_products_are_planned_with_every_option() -> None:
    ops = {op for op in ops_called(load(EVERY_OP)) if op.startswith("tk_gemm.")}
    planned: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for request in plan_model(load(EVERY_OP), ["sm_90a"], ops).jobs:
        planned[request.kernel.name.rpartition(".")[2]].add(request.args)
    # Their last arguments but the architecture: weights and a clamp; the gradient's dtype, and what is added to it.
    options = {args[-3:-1] for args in planned["fp8_swiglu_product_kernel"]}
    assert options == {(False, False), (False, True), (True, False), (True, True)}
    for name, kinds in (("fp8_product_kernel", ("k", "k_flat")), ("bf16_product_kernel", ("k",))):
        adds = {(torch.float32, None), (torch.float32, "d"), (torch.bfloat16, None), (torch.bfloat16, "c")}
        for kind in kinds:
            assert {(args[2], args[-2]) for args in planned[name] if args[0] == kind} == adds
        assert {args[-2] for args in planned[name] if args[0] == "dense"} == {None, "c", "d"}
    assert planned["group_maps_kernel"]


def examples(readme: Path) -> list[str]:
    """Python examples of a README that need no process group, with tensors on the meta device."""
    codes = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    return [re.sub(r'"(cuda|cpu)"', '"meta"', code) for code in codes if "init_process_group" not in code]


@pytest.mark.parametrize("readme", [r for r in READMES if examples(r)], ids=lambda readme: readme.parent.name)
def test_examples_of_the_readmes_are_covered(readme: Path) -> None:
    with capture(arch_from_name("sm_90a")) as requests:
        for code in examples(readme):
            exec(code, {})
    assert requests
    model = MODELING_MODEL if readme.parent.name == "tk-modeling" else README_MODEL
    assert not missing(requests, plan_of(model))


def _example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = module_from_spec(spec)
    sys.modules[name] = example  # dataclasses look their module up
    spec.loader.exec_module(example)
    return example


def test_the_example_layer_is_covered() -> None:
    example = _example("moe_layer")
    device = torch.device("meta")
    layer = example.make_layer(example.FULL, device)
    x = torch.empty(example.FULL.tokens, example.FULL.hidden, dtype=torch.bfloat16, device=device)
    with capture(arch_from_name("sm_90a")) as requests:
        example.run_layer(layer, x, example.FULL.topk, example.Stages("", device))
    assert len({request.kernel.name for request in requests}) >= 7
    assert not missing(requests, plan_of("deepseek-v3"))


class _OneRank:
    """Stands for the buffer of one of several ranks: the calls of a LocalGroup of which only that rank's are given."""

    rank_idx, backend = 0, "symmetric"

    def __init__(self, num_ranks: int, reduces: bool, size: Any) -> None:
        self.num_ranks = num_ranks
        sizes = {"num_max_tokens_per_rank": size.tokens, "hidden": size.hidden, "num_topk": size.topk}
        self._group = LocalGroup(num_ranks, "meta", allow_multiple_reduction=reduces, **sizes)

    def dispatch(self, x: Any, topk_idx: Any, weights: Any, **options: Any) -> tuple[Any, ...]:
        every = ([each] * self.num_ranks for each in (x, topk_idx, weights))
        results = self._group.dispatch(*every, do_cpu_sync=False, **options)
        self._handles = results[3]
        return *(each and each[0] for each in results), None

    def combine(self, x: Any, handle: Any) -> tuple[Any, ...]:
        return *(each and each[0] for each in self._group.combine([x] * self.num_ranks, self._handles)), None


def test_the_example_layer_on_several_ranks_is_covered() -> None:
    """tk-ep's kernels of it; the others depend on how many experts a rank has."""
    layer_file, ep_file = (_example(name) for name in ("moe_layer", "moe_layer_ep"))
    device = torch.device("meta")
    layer = layer_file.make_layer(layer_file.FULL, device)
    x = torch.empty(layer_file.FULL.tokens, layer_file.FULL.hidden, dtype=torch.bfloat16, device=device)
    with capture(arch_from_name("sm_90a")) as requests:
        for num_ranks, reduces in product((2, 8), (True, False)):
            buffer = _OneRank(num_ranks, reduces, layer_file.FULL)
            ep_file.run_layer(buffer, layer, x, layer_file.FULL.topk, layer_file.Stages("", device))
    requests = [each for each in requests if each.kernel.name.startswith("tk_ep.")]
    assert len({request.kernel.name for request in requests}) == 8
    model = load("deepseek-v3")
    assert not missing(requests, plan_model(model, ["sm_90a"], {op for op in ops_called(model) if "tk_ep" in op}))


_SMALL = """
max_tokens = 300
[tk_quant]
widths = [256]
intermediate = [128]
activations = [{ fmt = "e4m3", num_per_channels = 128 }]
"""

_SERVE = """
import sys
import torch
from tk_core import compat
from tk_core.arch import arch_from_name, compiling_for
from tk_core.op import Op
from tk_core.cli.profile import load
from tk_core.kernel import Kernel

# Kernels are compiled or loaded as on a GPU, but not launched.
torch.cuda.current_device = lambda: None
Op.__call__ = lambda self, *args, **kwargs: self._serve(self.bind(*args, **kwargs), None)
Kernel.__call__ = lambda self, *args: (self.compile(*args), lambda *_: None)[1]


def serve(*overrides):
    for num_tokens in (1, 77, 300):
        for _, op, arguments in load(sys.argv[1], overrides).calls(num_tokens):
            op(**arguments)


with compiling_for(arch_from_name("sm_90a")):
    serve()
    print("compilations:", compat.num_compilations)
    serve("widths=[320]")
"""


@pytest.mark.compile
def test_a_warm_model_is_served_without_compiling(tmp_path: Path) -> None:
    """Kernels that were compiled without a GPU, and carried to another machine, are all that a server needs."""
    model, archive = tmp_path / "small.toml", str(tmp_path / "kernels.zip")
    model.write_text(_SMALL)

    def run(cache: str, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path / cache), **more}
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)

    tk = ("-m", "tk_core.cli")
    for outcome in ("3 compiled, 0 cached already, 0 failed", "0 compiled, 3 cached already, 0 failed"):
        warm = run("built", *tk, "warmup", "--model", str(model), "--arch", "sm_90a", "-j", "2")
        assert warm.returncode == 0, warm.stdout + warm.stderr
        assert outcome in warm.stdout
    assert "exported 3 kernels" in run("built", *tk, "cache", "export", archive).stdout
    assert "imported 3 kernels" in run("carried", *tk, "cache", "import", archive).stdout
    served = run("carried", "-c", _SERVE, str(model), TK_COMPILE="forbid")
    assert "compilations: 0" in served.stdout, served.stderr
    # Another width needs another kernel.
    assert served.returncode != 0
    error = served.stderr.strip().splitlines()[-1]
    refused = r"tk_quant\.per_token_cast: tk_quant\.\S+\(.*, 320, .*sm_90a\): TK_COMPILE=forbid"
    assert re.search(refused, error), error
