"""Hashes of what the cases of ops launch: gpu-verified.json has them, and a case that has another one is stale.

A hash covers, in the order of the launches, the structure of each kernel's program (not the names of its variables)
with constants, CUDA text, pass configurations and compiler flags, and the launch's scalars and layouts of tensors. It
is the same in all processes that have the same version of TileLang.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from hashlib import sha256
from multiprocessing import get_context
from typing import Any

import torch

from tk_core import compat, ledger
from tk_core.arch import arch_from_name
from tk_core.kernel import KernelRequest, capture, recorded_launches
from tk_core.testing.specs import Case, OpSpec, load_specs
from tk_core.testing.usage import build

_ARCH = "sm_90a"
"""Architecture of the hashes of an op that has no record."""


def compared(ops: Sequence[str]) -> Iterator[tuple[str, ledger.Status]]:
    """Each op with its state, after its cases were compared with its record, if that is comparable and not pending."""
    chosen = [op for op in ops if ledger.status(op).state == "verified" and not ledger.not_comparable(op)]
    hashes = hashes_of_all(chosen)
    for op in ops:
        yield op, ledger.status(op, next(hashes) if op in chosen else None)


def hashes_of_all(ops: Sequence[str], arch: str | None = None) -> Iterator[dict[str, str]]:
    """`hashes_of` each op; those of several ops are computed in a process for each core."""
    if len(ops) == 1:
        yield hashes_of(ops[0], arch)
    elif ops:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            yield from pool.map(partial(hashes_of, arch=arch), ops)


def hashes_of(op: str, arch: str | None = None) -> dict[str, str]:
    """The hash of each gpu case of an op as it is now, for an architecture, by default that of the op's record."""
    arch = arch or ledger.entries(op).get(op, {}).get("arch", _ARCH)
    spec = load_specs(op.partition(".")[0])[op]
    return {case.name: case_hash(spec, case, arch) for case in spec.cases if case.gpu}


def case_hash(spec: OpSpec, case: Case, arch: str) -> str:
    """Hash of what one call launches on an architecture, in order: programs, scalars and the layouts of tensors."""
    torch.manual_seed(0)
    with capture(arch_from_name(arch)), recorded_launches() as recorded:
        spec.op(**case.make("meta"))
    digest = sha256()
    for request, args in recorded.launches:
        digest.update(f"{_program(request)} {[_layout(arg) for arg in args]}".encode())
    return digest.hexdigest()[:8]


@cache
def _program(request: KernelRequest) -> str:
    """Hash of a kernel's program, and the options that it is compiled with."""
    options = request.kernel._pass_configs, request.kernel._compile_flags
    return f"{compat.structural_hash(build(request.kernel, *request.args))} {options}"


def _layout(value: Any) -> Any:
    """A kernel's argument; of a tensor only its dtype and layout, as addresses and data differ from run to run."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    return value
