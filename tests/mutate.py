"""Breaks one thing at a time and runs the op's own tests on a CPU: what none of them notices is listed.

    python tests/mutate.py references                 each reference returns sevens, or has one element changed
    python tests/mutate.py checks --sample 40         a check of arguments is left out
    python tests/mutate.py fakes tk_moe               an output is one longer than it should be, on fake tensors
    python tests/mutate.py outputs tk_moe.topk_gate   an argument that an operator writes into is not declared

Names of packages and ops choose some; by default all are broken. A test that fails, or can't be collected, has noticed.
The exit code is 1 if something went unnoticed.
"""

import argparse
import ast
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor

from tk_core.testing import OpSpec, load_specs
from tk_core.testing.trees import storage_bytes, tensors

ROOT = Path(__file__).resolve().parents[1]
# Exit code of a fork in which an exception left the script, not a test.
_NOT_MADE = 70


class Op(NamedTuple):
    """What the mutations need to know of an op; its spec would import what they change."""

    name: str
    module: str
    reference: str
    mutates: list[str]
    tests: str


class Mutation(NamedTuple):
    """One change: `apply` makes it in a process that has imported nothing of the packages yet."""

    op: Op
    what: str
    apply: Callable[[], None]


def in_child(function: Callable[[], int], output: Path) -> int:
    """Exit code of a function in a fork of this process, which has imported what takes long; -14 after ten minutes."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        signal.alarm(600)
        sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        code = _NOT_MADE
        try:
            code = int(function())
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _print_ops() -> int:
    specs = load_specs()
    files = {
        spec.name: module.__file__
        for name, module in sys.modules.copy().items()
        if name.startswith("packages.")
        for spec in vars(module).values()
        if isinstance(spec, OpSpec) and name.rpartition("test_")[2] in spec.name
    }
    facts = [(spec.op.__module__, spec.reference.__module__, spec.mutates, files[name]) for name, spec in specs.items()]
    print(json.dumps([(name, *each) for name, each in zip(specs, facts)]))
    return 0


def find_ops(chosen: Sequence[str], scratch: Path) -> list[Op]:
    """The ops of these names and packages, all without any."""
    code = in_child(_print_ops, scratch)
    assert code == 0, scratch.read_text()
    ops = [Op(*facts) for facts in json.loads(scratch.read_text())]
    return [op for op in ops if not chosen or {op.name, *op.name.split(".")} & {*chosen}]


# ---- what is broken


def _sevens(x: torch.Tensor) -> None:
    try:
        x.fill_(7)
    except (RuntimeError, NotImplementedError):
        storage_bytes(x).fill_(7)


def _change_one(x: torch.Tensor) -> None:
    if x.numel():
        first = x[(0,) * x.dim()]
        if x.dtype == torch.bool:
            first.logical_not_()
        elif x.element_size() == 1:
            first.view(torch.uint8).bitwise_xor_(0x41)
        else:
            first.copy_(first.nan_to_num() * 2 + 1)


def references(op: Op) -> Iterator[Mutation]:
    """The reference's results, or what it writes into, become wrong."""

    def breaking(change: Callable[[list[torch.Tensor]], None]) -> None:
        module = importlib.import_module(op.reference)
        name = op.name.partition(".")[2]
        right = getattr(module, name)

        @wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = right(*args, **kwargs)
            given = dict(zip(right.__code__.co_varnames, args)) | kwargs
            written = [given.get(each) for each in op.mutates] if result is None else result
            with torch.no_grad():
                change([x for x in tensors(written) if not x.is_meta and not isinstance(x, FakeTensor)])
            return result

        # A file of its op's name has handed the right one to the package already.
        for place in (module, importlib.import_module(f"{op.name.partition('.')[0]}.reference")):
            setattr(place, name, wrong)

    yield Mutation(op, "the reference returns sevens", lambda: breaking(lambda found: [*map(_sevens, found)]))
    yield Mutation(op, "an element of the first result", lambda: breaking(lambda found: [*map(_change_one, found[:1])]))


class _Replace(ast.NodeTransformer):
    """Replaces the nodes at one place."""

    def __init__(self, place: tuple[int, int], kind: type[ast.AST], replace: Callable[[Any], ast.AST]) -> None:
        self.place, self.kind, self.replace = place, kind, replace

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, self.kind) and (node.lineno, node.col_offset) == self.place:
            return ast.copy_location(self.replace(node), node)
        return self.generic_visit(node)


def rewriting(module: str, node: ast.AST, replace: Callable[[Any], ast.AST]) -> Callable[[], None]:
    """Import a module with another node in the place of one."""

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            tree = ast.parse(self.get_data(self.path))
            tree = _Replace((node.lineno, node.col_offset), type(node), replace).visit(tree)
            return compile(ast.fix_missing_locations(tree), self.path, "exec")

    class Finder(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(fullname, path) if fullname == module else None
            if spec is not None:
                spec.loader = Loader(fullname, spec.origin)
            return spec

    return lambda: sys.meta_path.insert(0, Finder())


def _nodes(op: Op) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of the op's source file, without other ops that stand in it."""
    package, _, rest = op.module.partition(".")
    file = ROOT / "packages" / package.replace("_", "-") / "src" / package / f"{rest.replace('.', '/')}.py"
    for top in ast.parse(file.read_text(encoding="utf-8")).body:
        match top:
            case ast.FunctionDef(name, decorator_list=[_, *_]) if name.lstrip("_") != op.name.rpartition(".")[2]:
                continue
        yield from ((f"{file.stem}.py", node) for node in ast.walk(top))


def checks(op: Op) -> Iterator[Mutation]:
    """A statement `check.…(…)` is gone."""
    for file, node in _nodes(op):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("check")))):
                what = f"{file}:{node.lineno} {ast.unparse(node)[:90]}"
                yield Mutation(op, what, rewriting(op.module, node, lambda _: ast.Pass()))


def _grown(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, FakeTensor):
        return x
    return x.new_empty((x.shape[0] + 1, *x.shape[1:]) if x.dim() else (1,))


def fakes(op: Op) -> Iterator[Mutation]:
    """A result of the op has one row more than it should, if it is a fake tensor."""
    grow = ast.parse("__import__('sys').modules['__main__']._grown", mode="eval").body
    for file, node in _nodes(op):
        match node:
            case ast.Call(ast.Name("new")):
                what = f"{file}:{node.lineno} {ast.unparse(node)[:90]}"
                yield Mutation(op, what, rewriting(op.module, node, lambda call: ast.Call(grow, [call], [])))


def outputs(op: Op) -> Iterator[Mutation]:
    """One of the arguments that an operator writes into is not declared."""
    for file, node in _nodes(op):
        match node:
            case ast.keyword("writes", ast.Tuple(names)):
                for gone in names:
                    left = ast.keyword("writes", ast.Tuple([name for name in names if name is not gone], ast.Load()))
                    what = f"{file}:{node.lineno} {ast.unparse(gone)} undeclared"
                    yield Mutation(op, what, rewriting(op.module, node, lambda _, left=left: left))


KINDS = {"references": references, "checks": checks, "fakes": fakes, "outputs": outputs}


def run_tests(mutation: Mutation, kind: str) -> int:
    """pytest's exit code for the op's tests with the mutation made."""
    mutation.apply()
    files = [mutation.op.tests]
    if kind == "checks":
        files.append(f"{ROOT}/tests/test_bad_arguments.py::test_bad_arguments[{mutation.op.name}]")
    options = ["-n0", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not compile"]
    if kind == "fakes":
        options += ["-k", "not torch-compile"]  # it can't trace the change
    return pytest.main([*options, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *files])


def main() -> int:
    """Make all mutations of a kind, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("ops", nargs="*", metavar="PACKAGE|OP")
    parser.add_argument("--sample", type=int, metavar="N", help="make N of the mutations, chosen at random")
    options = parser.parse_args()
    os.nice(10)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"mutate-{os.getpid()}"
    mutations = [each for op in find_ops(options.ops, scratch) for each in KINDS[options.kind](op)]
    if options.sample:
        mutations = random.Random(0).sample(mutations, min(options.sample, len(mutations)))
    unnoticed = 0
    for mutation in mutations:
        code = in_child(partial(run_tests, mutation, options.kind), scratch)
        lines = scratch.read_text(encoding="utf-8", errors="replace").splitlines()
        by = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"exit code {code}")
        how = {0: "UNNOTICED", _NOT_MADE: "NOT MADE "}.get(code, "noticed  ")
        unnoticed += how != "noticed  "
        print(f"{how} {mutation.op.name}: {mutation.what}" + ("" if code == 0 else f" ← {by[:150]}"), flush=True)
    scratch.unlink(missing_ok=True)
    print(f"{unnoticed} of {len(mutations)} went unnoticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
