"""Which kernels `tk warmup` compiles: those that ops request when they run on tensors of the meta device."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tk_core.cli.profile import ModelProfile

if TYPE_CHECKING:
    from tk_core.kernel import KernelRequest
    from tk_core.testing import Case, OpSpec


@dataclass(frozen=True)
class Job:
    """One kernel to compile: what a worker process needs to build it, and who asked for it."""

    kernel: str
    """Module and name, joined by a dot."""
    args: tuple[Any, ...]
    """Its compile-time arguments, the architecture last."""
    asked_by: str

    def __str__(self) -> str:
        return f"{self.kernel} for {self.args[-1]} ({self.asked_by})"


@dataclass
class Plan:
    """Kernels to compile, each once, and calls that failed or that an architecture does not serve."""

    jobs: "dict[KernelRequest, Job]" = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)
    unsupported: dict[tuple[str, str], str] = field(default_factory=dict)
    """(who asked, architecture) → message of the UnsupportedArchError."""

    def ask(self, call: Callable[[], Any], arch_name: str, asked_by: str) -> "frozenset[KernelRequest]":
        """Add the kernels that a call launches on an architecture to the plan, and return them."""
        from tk_core.arch import UnsupportedArchError, arch_from_name
        from tk_core.kernel import capture

        try:
            with capture(arch_from_name(arch_name)) as requests:
                call()
        except UnsupportedArchError as error:
            self.unsupported[asked_by, arch_name] = str(error)
            return frozenset()
        except Exception as error:
            self.failures[f"{asked_by} for {arch_name}: {type(error).__name__}: {error}"] = None
            return frozenset()
        for request in requests:
            self.jobs.setdefault(request, Job(request.kernel.name, request.args, asked_by))
        return frozenset(requests)


def plan_cases(specs: "dict[str, OpSpec]", archs: Sequence[str], wanted: "Callable[[Case], bool]") -> Plan:
    """The kernels of all wanted cases of tests."""
    plan = Plan()
    for op, spec in specs.items():
        for case in filter(wanted, spec.cases):
            for arch in archs:
                plan.ask(lambda spec=spec, case=case: spec.op(**case.make("meta")), arch, f"{op}, {case.name}")
    return plan


def token_counts(max_tokens: int) -> list[int]:
    """The first token counts to try: next to powers of two and halfway between these, and `max_tokens`."""
    powers = [1 << bit for bit in range(max_tokens.bit_length())]
    near = {count + offset for power in powers for count in (power, power + power // 2) for offset in (-1, 0, 1)}
    return sorted({count for count in near if 1 <= count <= max_tokens} | {max_tokens})


def plan_model(profile: ModelProfile, archs: Sequence[str], ops: Collection[str], num_sms: int | None = None) -> Plan:
    """The kernels that these ops take for batches of 1 to `profile.max_tokens` tokens, in a model of this profile.

    Some ops choose kernels by the number of tokens. The range between two token counts with different kernels is
    halved until the counts where the choice changes are found. `num_sms` is for a GPU with fewer SMs than is usual
    for its architecture.
    """
    import tk_core

    plan = Plan()
    with tk_core.num_sms(num_sms):
        for arch in archs:
            _ask_for_all_counts(plan, profile, arch, ops)
    return plan


def _ask_for_all_counts(plan: Plan, profile: ModelProfile, arch: str, ops: Collection[str]) -> None:
    def kernels_at(num_tokens: int, ops: Collection[str]) -> "dict[str, set[KernelRequest]]":
        found: dict[str, set[KernelRequest]] = defaultdict(set)
        for name, op, arguments in profile.calls(num_tokens, {op.partition(".")[0] for op in ops}):
            if name in ops:
                found[name] |= plan.ask(lambda op=op, arguments=arguments: op(**arguments), arch, name)
        return found

    counts = token_counts(profile.max_tokens)
    found = {count: kernels_at(count, ops) for count in counts}
    waiting = list(pairwise(counts))
    while waiting:
        few, many = waiting.pop()
        changed = {op for op in found[few].keys() & found[many].keys() if found[few][op] != found[many][op]}
        middle = (few + many) // 2
        if changed and few < middle:
            found[middle] = kernels_at(middle, changed)
            waiting += [(few, middle), (middle, many)]
    # Some calls have dtypes of another architecture. An op that serves any call on this one is not unsupported.
    for op in {op for by_op in found.values() for op, kernels in by_op.items() if kernels}:
        plan.unsupported.pop((op, arch), None)


def ops_called(profile: ModelProfile) -> Iterable[str]:
    """Names of all ops that a model calls."""
    return dict.fromkeys(name for name, _, _ in profile.calls(1))
