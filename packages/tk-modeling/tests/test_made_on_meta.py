"""Modules made without memory, as large models are: reset_parameters sets all that the constructor sets, shards too."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tk_modeling
from tk_core.testing.trees import map_tensors, tensors

from .engram import cases as engram
from .fp8 import cases as fp8
from .mhc import cases as mhc
from .moe import cases as moe

ROOT = Path(__file__).parents[3]
BF16 = {"dtype": torch.bfloat16}
CONNECTION = {"norm_weight": True, "sinkhorn_repeat": 3}
_MOE = {case.name: case.make_inputs for case in moe.CASES}
MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, ...]]]] = {
    "engram-gate": (lambda: tk_modeling.EngramGate(128, **BF16), engram.CASES[0].make_inputs),
    "engram": (lambda: tk_modeling.Engram(64, engram.LAYOUT, 1, head_dim=32, **BF16), engram.CASES[1].make_inputs),
    "hyper-connection": (
        lambda: tk_modeling.HyperConnection(nn.Linear(64, 64, **BF16), 64, **CONNECTION),
        mhc.CASES[0].make_inputs,
    ),
    "hyper-head": (lambda: tk_modeling.HyperHead(64, norm_weight=True), mhc.CASES[0].make_inputs),
    "router": (lambda: tk_modeling.Router(64, 16, 4, aux_loss_factor=0.5), _MOE["router"]),
    "moe": (lambda: tk_modeling.MoE(64, 64, 8, 2, **BF16), _MOE["moe"]),
    "moe-fp8": (lambda: tk_modeling.MoE(128, 128, 4, 2, fp8=True, **BF16), _MOE["moe-fp8"]),
    "fp8-linear": (lambda: tk_modeling.FP8Linear(256, 128, **BF16), fp8.LINEAR.make_inputs),
    "grouped-fp8-linear": (lambda: tk_modeling.GroupedFP8Linear(5, 256, 128, **BF16), fp8.GROUPED.make_inputs),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name][0]()


def made_on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MAKERS[name][0]()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def give_memory(module: nn.Module) -> None:
    """With garbage in it, which reset_parameters replaces."""
    module.to_empty(device="cpu")
    for x in module.state_dict().values():
        (x.to_local() if isinstance(x, DTensor) else x).fill_(float("nan") if x.is_floating_point() else 7)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def check_state(module: nn.Module, usual: nn.Module) -> None:
    """Buffers and constants are the usual module's, and what is drawn at random has its mean and deviation."""
    found = {name: whole(x) for name, x in module.state_dict().items()}
    assert found.keys() == usual.state_dict().keys()
    for name, want in usual.state_dict().items():
        got = found[name].detach()
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if not want.is_floating_point() or want.unique().numel() <= 4:
            assert torch.equal(got, want), name
            continue
        got, want = got.double(), want.double()
        bound = 6 * float(want.std()) / want.numel() ** 0.5
        assert abs(got.mean() - want.mean()) < bound, name
        assert abs(got.std() - want.std()) < bound, name


def step(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    outputs = [y for y in tensors(module(*inputs)) if y.requires_grad]
    sum(y.float().square().sum() for y in outputs).backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()


@pytest.mark.parametrize("name", MAKERS)
def test_one_process(name: str) -> None:
    module = made_on_meta(name)
    give_memory(module)
    check_state(module, made(name))


def _check_shards(name: str) -> None:
    module = made_on_meta(name)
    # A unit has parameters of one dtype.
    for part in module.children():
        fully_shard(part)
    fully_shard(module)
    give_memory(module)
    assert any(isinstance(x, DTensor) for x in module.parameters())
    check_state(module, made(name))
    alone = made(name)
    alone.load_state_dict({key: whole(x).clone() for key, x in module.state_dict().items()})
    before = copy.deepcopy(alone.state_dict())
    torch.manual_seed(1)
    inputs = map_tensors(lambda x: x.requires_grad_(x.is_floating_point()), MAKERS[name][1]((2, 5), "cpu"))
    for each in (module, alone):
        step(each, inputs)
    changed = []
    for key, want in alone.state_dict().items():
        torch.testing.assert_close(whole(module.state_dict()[key]), want, msg=lambda text, key=key: f"{key}: {text}")
        changed += [key] if not torch.equal(want, before[key]) else []
    assert changed


def _work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for name in MAKERS:
            try:
                _check_shards(name)
            except Exception as error:
                raise AssertionError(f"{name}, process {rank}") from error
    finally:
        dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    run = f"from importlib import import_module; import_module({__name__!r})._work"
    commands = [
        [sys.executable, "-W", "ignore", "-c", f"{run}({rank}, {str(tmp_path / 'store')!r})"] for rank in range(2)
    ]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
