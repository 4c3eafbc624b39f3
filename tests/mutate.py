"""Breaks one thing at a time and runs the tests of the ops that use it on a CPU: what none of them notices is listed.

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
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor

import tk_core.testing.specs
from tk_core.testing import OpSpec, load_specs
from tk_core.testing.trees import storage_bytes, tensors

ROOT = Path(__file__).resolve().parents[1]
# Exit code of a fork in which an exception left the script, not a test.
_NOT_MADE = 70
# Without its check a size of 2**31 may take more memory than there is.
_MOST_BYTES = 16 << 30


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
    """What is changed and how; ops that share code share this."""
    apply: Callable[[], None]


def in_child(function: Callable[[], int], output: Path) -> int:
    """Exit code of a function in a fork of this process, which has imported what takes long; -14 after ten minutes."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        signal.alarm(600)
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
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

    every, first = f"{op.name}: its reference returns sevens", f"{op.name}: an element of its reference's first result"
    yield Mutation(op, every, lambda: breaking(lambda found: [*map(_sevens, found)]))
    yield Mutation(op, first, lambda: breaking(lambda found: [*map(_change_one, found[:1])]))


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


@cache
def _statements(module: str) -> list[ast.stmt]:
    """The top level of one of our modules; nothing of a package, whose names are those of its modules."""
    package = module.partition(".")[0]
    file = ROOT / "packages" / package.replace("_", "-") / "src" / f"{module.replace('.', '/')}.py"
    return ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []


def _nodes(op: Op) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of the op's function, and of all of its package that it uses, with the modules in which they stand."""
    package, _, name = op.name.partition(".")
    left = [(op.module, name), (op.module, f"_{name}")]
    for module, wanted in left:
        for top in _statements(module):
            found = []
            match top:
                case ast.FunctionDef(name) | ast.ClassDef(name) if name == wanted:
                    yield from ((module, node) for node in ast.walk(top))
                    found = [(module, node.id) for node in ast.walk(top) if isinstance(node, ast.Name)]
                case ast.ImportFrom(source, names) if source.startswith(f"{package}."):
                    found = [(source, wanted) for alias in names if alias.name == wanted]
            left += [each for each in dict.fromkeys(found) if each not in left]


def _what(module: str, node: ast.AST, change: str = "") -> str:
    return f"{module}:{node.lineno}:{node.col_offset} {change or ast.unparse(node)[:90]}"


def checks(op: Op) -> Iterator[Mutation]:
    """A statement `check.…(…)` is gone."""
    for module, node in _nodes(op):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("check")))):
                yield Mutation(op, _what(module, node), rewriting(module, node, lambda _: ast.Pass()))


def _grown(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, FakeTensor):
        return x
    return x.new_empty((x.shape[0] + 1, *x.shape[1:]) if x.dim() else (1,))


def fakes(op: Op) -> Iterator[Mutation]:
    """A result of the op has one row more than it should, if it is a fake tensor."""
    grow = ast.parse("__import__('sys').modules['__main__']._grown", mode="eval").body
    for module, node in _nodes(op):
        match node:
            case ast.Call(ast.Name("new" | "given_or_new")):
                grown = rewriting(module, node, lambda call: ast.Call(grow, [call], []))
                yield Mutation(op, _what(module, node), grown)


def outputs(op: Op) -> Iterator[Mutation]:
    """One of the arguments that an operator writes into is not declared."""
    for module, node in _nodes(op):
        match node:
            case ast.keyword("writes", ast.Tuple(names)):
                for gone in names:
                    left = ast.keyword("writes", ast.Tuple([name for name in names if name is not gone], ast.Load()))
                    what = _what(module, node, f"{ast.unparse(gone)} undeclared")
                    yield Mutation(op, what, rewriting(module, node, lambda _, left=left: left))


KINDS = {"references": references, "checks": checks, "fakes": fakes, "outputs": outputs}


def run_tests(mutation: Mutation, ops: Sequence[Op], kind: str) -> int:
    """pytest's exit code for the tests of these ops with the mutation made."""
    mutation.apply()
    own, others = [*dict.fromkeys(op.tests for op in ops)], []
    package = mutation.op.name.partition(".")[0]
    options = ["-n0", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not compile"]
    options += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    if kind == "fakes":
        options += ["-k", "not torch-compile"]  # it can't trace the change
    if kind == "outputs":
        others = [f"{ROOT}/tests/test_outputs.py::test_outputs_over_other_arguments[{op.name}]" for op in ops]
    if kind == "checks":
        options += ["-k", "not test_tiers"]  # all of its input is good
        others = [f"{ROOT}/tests/test_bad_arguments.py::test_bad_arguments[{op.name}]" for op in ops]
        folder = ROOT / "packages" / package.replace("_", "-") / "tests"
        texts = {str(file): file.read_text(encoding="utf-8") for file in folder.rglob("test_*.py")}
        module = mutation.what.partition(":")[0]
        names = [module, f"{package}.{module.rpartition('.')[2]}", *(op.name for op in ops)]
        others += [file for file, text in texts.items() if file not in own and any(name in text for name in names)]
    # Files for all ops need to import only this package's tests.
    tk_core.testing.specs.packages = lambda: [package]
    # Not every op is in each file for all: then there is nothing to run, or no test of that name.
    silent = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR)
    for files in (own, *([each] for each in others)):
        if (code := pytest.main([*options, *files])) not in silent:
            return code
    return 0


def main() -> int:
    """Make all mutations of a kind, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("ops", nargs="*", metavar="PACKAGE|OP")
    parser.add_argument("--sample", type=int, metavar="N", help="make N of the mutations, chosen at random")
    options = parser.parse_args()
    os.nice(10)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"mutate-{os.getpid()}"
    found: dict[str, list[Mutation]] = {}
    for op in find_ops(options.ops, scratch):
        for mutation in KINDS[options.kind](op):
            found.setdefault(mutation.what, []).append(mutation)
    chosen = [*found.values()]
    if options.sample:
        chosen = random.Random(0).sample(chosen, min(options.sample, len(chosen)))
    unnoticed = 0
    for mutation, *more in chosen:
        ops = [mutation.op, *(each.op for each in more)]
        code = in_child(partial(run_tests, mutation, ops, options.kind), scratch)
        lines = scratch.read_text(encoding="utf-8", errors="replace").splitlines()
        by = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"exit code {code}")
        how = {0: "UNNOTICED", _NOT_MADE: "NOT MADE "}.get(code, "noticed  ")
        unnoticed += how != "noticed  "
        print(f"{how} {mutation.what}" + ("" if code == 0 else f" ← {by[:150]}"), flush=True)
    scratch.unlink(missing_ok=True)
    print(f"{unnoticed} of {len(chosen)} went unnoticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
