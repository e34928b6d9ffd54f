"""Every name, attribute and call of vLLM's in our own source, looked up in the source of one release.

    our .py files ──walk──▶ imports, `engine.output_processor.request_states`, `get_rope(size, max_position=...)`
                  ──Source──▶ there, with such parameters? ──no──▶ Break: our line, vLLM's line, why

The walk follows types as far as annotations and assignments tell them, on both sides. It knows `isinstance`, releases
that `VERSION` tells apart, and what `hasattr` and `getattr(..., default)` only ask for. Nothing is imported.
"""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from tests.contract.source import (
    Class,
    Function,
    FunctionNode,
    Instance,
    Module,
    OneOf,
    Outside,
    Place,
    Scope,
    Source,
    Type,
)
from vllm_patching.compat.vllm_flags import flags_in, flags_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm_patching", "example_trainer")
PARSER = "make_arg_parser"  # an object annotated with it is the namespace that it parses into
POSITIONAL = "model_tag"  # of that namespace
LAUNCHER = "example_trainer/vllm_api_server.py"  # whose own flags are parsed together with vLLM's
KERNELS = "torch.ops._C."  # vLLM's compiled ones


@dataclass(frozen=True)
class Use:
    """Something of vLLM's that a line of ours needs."""

    ours: Place
    what: str


@dataclass(frozen=True)
class Break:
    """A use that a release does not serve."""

    use: Use
    theirs: Place
    why: str

    def __str__(self) -> str:
        return f"{self.use.ours} uses {self.use.what}, but {self.theirs}: {self.why}"


class Contract:
    """What `ours` uses of the release whose unpacked wheel is `wheel`: `uses` and `breaks`, after `check`."""

    def __init__(self, wheel: Path, version: str, ours: Path = ROOT) -> None:
        self.wheel, self.version, self.ours = wheel, Version(version), ours
        self.source = Source(wheel, ours)
        self.uses: set[Use] = set()
        self.breaks: list[Break] = []

    def check(self) -> None:
        """Walk all files."""
        for package in PACKAGES:
            for path in sorted((self.ours / package).rglob("*.py")):
                if "vllm" not in path.read_text(encoding="utf-8"):
                    continue
                module = ".".join(path.relative_to(self.ours).with_suffix("").parts).removesuffix(".__init__")
                tree = self.source.tree(module)
                assert tree is not None
                _Walk(self, module, Scope(self.source, module)).block(tree.body)

    def used(self, ours: Place, what: str, theirs: Place, why: str | None) -> None:
        """Note a use, and a break if there is a reason `why`."""
        use = Use(ours, what)
        self.uses.add(use)
        found = Break(use, theirs, why or "")
        if why and found not in self.breaks:
            self.breaks.append(found)

    def elsewhere(self, name: str) -> str:
        """Where the release defines something of that name, for a message."""
        pattern = rf"^\s*((async )?def|class) {name}\b|^\s*{name}\s*[:=]"
        command = ["grep", "-rnE", "--include=*.py", "-m1", pattern, "vllm"]
        lines = subprocess.run(command, cwd=self.wheel, capture_output=True, text=True, check=False).stdout.splitlines()
        places = [":".join(line.split(":")[:2]) for line in sorted(lines)[:3]]
        return f"; the name is in {', '.join(places)}" if places else "; the name is nowhere in this release"

    @cached_property
    def flags(self) -> set[str]:
        """The names that `vllm serve` parses, and our launcher with it, with underscores."""
        return {POSITIONAL, *flags_of(self.wheel / "vllm"), *flags_in(self.ours / LAUNCHER)}


class _Walk:
    """One function, or the statements of a module, with the types of its names."""

    def __init__(self, contract: Contract, module: str, scope: Scope) -> None:
        self.contract, self.source, self.module, self.scope = contract, contract.source, module, scope
        self.probed: set[str] = set()  # attributes that `hasattr` has asked for, where one is now

    def block(self, body: list[ast.stmt]) -> None:
        """Statements up to one that this release cannot pass."""
        for statement in body:
            if isinstance(statement, ast.If) and (holds := self._holds(statement.test)) is not None:
                taken = statement.body if holds else statement.orelse
                self.block(taken)
                if taken and isinstance(taken[-1], ast.Return | ast.Raise):
                    return
            else:
                self._visit(statement)

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node)
            case ast.ClassDef():
                self._class(node)
            case ast.If():
                self._visit(node.test)
                self._branch(node)
            case _:
                self._check(node)
                for child in ast.iter_child_nodes(node):
                    self._visit(child)

    def _function(self, node: FunctionNode, this: Instance | None = None) -> None:
        for each in [*node.decorator_list, *node.args.defaults]:
            self._visit(each)
        inside = _Walk(self.contract, self.module, Scope(self.source, self.module, node, self.scope, this))
        inside.block(node.body)

    def _class(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self._visit(base)
        for statement in node.body:
            if isinstance(statement, FunctionNode):
                self._function(statement, Instance(Class(self.module, node)))
            else:
                self._visit(statement)

    def _branch(self, node: ast.If) -> None:
        narrowed, probed = dict(self.scope.narrowed), set(self.probed)
        for test in ast.walk(node.test):
            if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 2:
                if test.func.id == "isinstance" and isinstance(test.args[0], ast.Name):
                    kind = self.scope.of(test.args[1])
                    if isinstance(kind, Class):
                        self.scope.narrowed[test.args[0].id] = Instance(kind)
                elif test.func.id == "hasattr" and isinstance(test.args[1], ast.Constant):
                    self.probed.add(str(test.args[1].value))
        self.block(node.body)
        self.scope.narrowed, self.probed = narrowed, probed
        self.block(node.orelse)

    def _holds(self, test: ast.expr) -> bool | None:
        """Whether a test that compares VERSION holds in this release; None for another test."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return False if any(self._holds(each) is False for each in test.values) else None
        if not (isinstance(test, ast.Compare) and ast.unparse(test.left).rpartition(".")[2] == "VERSION"):
            return None
        limit, operator = test.comparators[0], test.ops[0]
        assert isinstance(limit, ast.Call)
        assert isinstance(limit.args[0], ast.Constant)
        than = Version(str(limit.args[0].value))
        return self.contract.version >= than if isinstance(operator, ast.GtE) else self.contract.version < than

    # ---- what a node uses

    def _check(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                self._import(node, str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    self._import(node, alias.name, None)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, self.scope.of(node.value), node.attr)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
                for name in self._constants(node.args[1]):
                    self._attribute(node, self.scope.of(node.args[0]), name)
            self._call(node, self.scope.of(node.func))

    def _constants(self, node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.Constant):
            yield str(node.value)
        elif isinstance(node, ast.Name):
            for bound in self.scope.bound.get(node.id, []):
                if isinstance(bound, ast.For) and isinstance(bound.iter, ast.Tuple):
                    yield from (str(each.value) for each in bound.iter.elts if isinstance(each, ast.Constant))

    def _ours(self, node: ast.AST) -> Place:
        return self.source.place(self.module, node)

    def _import(self, node: ast.AST, module: str, name: str | None) -> None:
        if self.source.tree(module) is None:
            package = module
            while self.source.tree(package) is None:
                package = package.rpartition(".")[0]
            hint = self.contract.elsewhere(name) if name else ""
            self.contract.used(
                self._ours(node), module, self.source.place(package), f"there is no module {module}{hint}"
            )
        elif name is not None:
            why = None if self.source.exists(module, name) else f"no {name}{self.contract.elsewhere(name)}"
            self.contract.used(self._ours(node), f"{module}.{name}", self.source.place(module), why)

    def _attribute(self, node: ast.AST, base: Type | None, name: str) -> None:
        if isinstance(base, OneOf):
            for each in base.types:
                self._attribute(node, each, name)
        elif isinstance(base, Class | Instance):
            owner = base.of if isinstance(base, Instance) else base
            if owner.module.split(".")[0] == "vllm" and name not in self.probed:
                members = self.source.members(owner)
                theirs = self.source.place(owner.module, owner.node)
                if name in members:
                    theirs = self.source.place(members[name][0].owner.module, members[name][0].node)
                missing = not self.source.has(owner, name)
                why = f"{owner.node.name} has no {name}{self.contract.elsewhere(name)}" if missing else None
                self.contract.used(self._ours(node), f"{owner.node.name}.{name}", theirs, why)
        elif isinstance(base, Module) and base.name.split(".")[0] == "vllm":
            self._import(node, base.name, name)
        elif isinstance(base, Function) and base.node.name == PARSER and name not in self.probed:
            missing = name not in self.contract.flags
            why = f"it parses no --{name.replace('_', '-')}{self.contract.elsewhere(name)}" if missing else None
            theirs = self.source.place(base.module, base.node)
            self.contract.used(self._ours(node), f"the argument {name}", theirs, why)
        elif isinstance(base, Outside) and f"{base.name}." == KERNELS:
            self._kernel(node, name)

    def _kernel(self, node: ast.AST, name: str) -> None:
        command = ["grep", "-rnF", "--include=*.py", "-m1", f"{KERNELS}{name}", "vllm"]
        found = subprocess.run(command, cwd=self.contract.wheel, capture_output=True, text=True, check=False).stdout
        path, _, rest = found.partition(":")
        theirs = Place(path, int(rest.split(":")[0])) if found else self.source.place("vllm")
        self.contract.used(self._ours(node), KERNELS + name, theirs, None if found else "no file calls this kernel")

    def _call(self, node: ast.Call, called: Type | None) -> None:
        if isinstance(called, OneOf):
            for each in called.types:
                self._call(node, each)
        elif isinstance(called, Function) and called.module.split(".")[0] == "vllm":
            why = refusal(node, called.node, called.bound)
            self._called(node, called.node.name, called.module, called.node, why)
        elif isinstance(called, Class) and called.module.split(".")[0] == "vllm":
            makes = self.source.members(called).get("__init__")
            if makes and isinstance(makes[0].node, FunctionNode):
                why, place = refusal(node, makes[0].node, 1), makes[0]
                self._called(node, called.node.name, place.owner.module, place.node, why)
            else:
                self._called(node, called.node.name, called.module, called.node, self._fields_refuse(node, called))

    def _called(self, node: ast.Call, name: str, module: str, theirs: ast.AST, why: str | None) -> None:
        words = [*["_"] * len(node.args), *[f"{each.arg}=" for each in node.keywords if each.arg]]
        self.contract.used(self._ours(node), f"{name}({', '.join(words)})", self.source.place(module, theirs), why)

    def _fields_refuse(self, node: ast.Call, called: Class) -> str | None:
        """Why a class that makes its own __init__ of its fields does not take a call."""
        members = {name: each[0].node for name, each in self.source.members(called).items()}
        fields = {name: each for name, each in members.items() if isinstance(each, ast.AnnAssign)}
        given = [each.arg for each in node.keywords if each.arg]
        if unknown := [name for name in given if name not in fields]:
            return f"it has no field {', '.join(unknown)}"
        if any(each.arg is None for each in node.keywords) or any(isinstance(each, ast.Starred) for each in node.args):
            return None
        required = [name for name, each in fields.items() if each.value is None and "ClassVar" not in ast.unparse(each)]
        missing = [name for name in required[len(node.args) :] if name not in given]
        return f"it needs {', '.join(missing)}" if missing else None


def refusal(call: ast.Call, function: FunctionNode, bound: int) -> str | None:
    """Why `function`, of whose parameters the first `bound` are given, does not take such a call."""
    arguments = function.args
    positional = [each.arg for each in [*arguments.posonlyargs, *arguments.args]][bound:]
    keyword = [each.arg for each in arguments.kwonlyargs]
    names = [each.arg for each in call.keywords if each.arg]
    if arguments.kwarg is None and (unknown := [name for name in names if name not in [*positional, *keyword]]):
        return f"it takes no {', '.join(unknown)}"
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    if not starred and arguments.vararg is None and len(call.args) > len(positional):
        return f"it takes {len(positional)} positional arguments, not {len(call.args)}"
    if starred or any(each.arg is None for each in call.keywords):
        return None
    without_default = positional[: len(positional) - len(arguments.defaults)] if arguments.defaults else positional
    required = without_default[len(call.args) :]
    required += [name for name, default in zip(keyword, arguments.kw_defaults, strict=True) if default is None]
    missing = [name for name in required if name not in names]
    return f"it needs {', '.join(missing)}" if missing else None
