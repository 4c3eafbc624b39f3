"""Hashes of the programs that ops compile and of the arguments they launch them with, by case.

    PYTHONPATH=… python -P fingerprints.py sm_90a programs tk_moe.topk_gate …

prints them as JSON for the sources on PYTHONPATH, which may be those of an older commit: `tk verify --unchanged`
compares the hashes of two commits. Equal hashes mean the same work on a GPU. The hash of a kernel's program covers its
structure (not the names of its variables) with constants, CUDA text, pass configurations and flags. With `machine-code`
in place of `programs`, it covers the instructions that the kernel compiles to, which takes a second or more a kernel.
The hash of a launch covers its scalars and the layouts of its tensors.
"""

import hashlib
import json
import re
import sys
from functools import cache
from typing import Any

import torch

from tk_core import compat, kernel, ledger
from tk_core.arch import Arch, arch_from_name
from tk_core.testing import Case, OpSpec, load_specs
from tk_core.testing.usage import _configs, _cuobjdump, lower


def machine_code(request: kernel.KernelRequest) -> str:
    """The text of what a launch runs: the kernel's instructions, registers and shared memory, and the host code.

    Names in the host code are replaced by numbers, so that the text does not depend on the names of variables.
    """
    from tilelang import tvm
    from tilelang.cuda.backend import tilelang_callback_cuda_compile

    artifact = lower(request.kernel, *request.args)
    target = tvm.target.Target(request.arch.target)
    cubin = tilelang_callback_cuda_compile(artifact.kernel_source, target, _configs(request.kernel))
    device = _cuobjdump(bytes(cubin), ["--dump-sass", "--dump-resource-usage"])
    numbers: dict[str, int] = {}
    host = artifact.rt_mod.inspect_source()
    return device + re.sub(r"[A-Za-z_]\w*", lambda name: f"n{numbers.setdefault(name[0], len(numbers))}", host)


@cache
def _program(request: kernel.KernelRequest, compiled: bool) -> str:
    """Hash of a kernel's program and its compile options, or, if `compiled`, of the machine code."""
    compat.load_tilelang()
    if compiled:
        return hashlib.sha256(machine_code(request).encode()).hexdigest()
    from tilelang import tvm

    build, args = request.kernel.build, request.args
    how = request.kernel._pass_configs, request.kernel._compile_flags
    return f"{tvm.ir.structural_hash(build(*args), map_free_vars=True):x} {how}"


def _layout(value: Any) -> Any:
    """A kernel's argument; of a tensor only its dtype and layout, as addresses and data differ from run to run."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    return value


def fingerprint(spec: OpSpec, case: Case, arch: Arch, compiled: bool = False) -> str:
    """Hash of all kernels that one call requests, in order, and of the arguments that it launches them with."""
    digest = hashlib.sha256()
    torch.manual_seed(0)
    launches: list[tuple[int, tuple[Any, ...]]] = []
    ignore = kernel._ignore_launch
    try:
        with kernel.capture(arch) as requests:
            kernel._ignore_launch = lambda *args: launches.append((len(requests), args))
            spec.op(**case.make("meta"))
    finally:
        kernel._ignore_launch = ignore
    for request in requests:
        digest.update(_program(request, compiled).encode())
    for number, args in launches:
        digest.update(f"{number} {[_layout(arg) for arg in args]}".encode())
    return digest.hexdigest()


def fingerprints(op: str, arch: Arch, compiled: bool) -> dict[str, str]:
    """`fingerprint` of each case of the op's gpu tier; empty if there is no such op."""
    spec = load_specs(op.partition(".")[0]).get(op)
    if spec is None:
        return {}
    return {case.name: fingerprint(spec, case, arch, compiled) for case in spec.cases if case.gpu}


def main(arch: str, hashed: str, *ops: str) -> None:
    """Print state, entry and fingerprints of each op as JSON."""
    found = {}
    for op in ops:
        cases = fingerprints(op, arch_from_name(arch), hashed == "machine-code")
        status = ledger.status(op) if cases else ledger.Status("missing", None, None)
        found[op] = {"state": status.state, "entry": status.entry, "cases": cases}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
