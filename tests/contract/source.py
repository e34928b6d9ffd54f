"""Python source as names and types, read and never imported: our packages and one release of vLLM.

    module, name ──find──▶ Module | Class | Function | Items | Outside     (None: not known)
    expression   ──of────▶ the same, or Instance; by annotations, by what is assigned, by what functions return

An object of vLLM's whose type no annotation tells is `Annotated[Any, "vllm.module.Name"]` in our source
(vllm_patching/vllm_types.py). Used by `uses.py`.
"""

import ast
import builtins
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ONE_ARGUMENT = {"Optional", "ClassVar", "Final", "Required"}  # of typing: what they hold
VALUES = {"dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict"}
ELEMENTS = {"list", "set", "tuple", "Sequence", "Iterable", "Iterator", "Generator", "AsyncGenerator", "AsyncIterator"}
SAME_ITEMS = {"list", "set", "tuple", "sorted", "reversed", "iter"}


@dataclass(frozen=True)
class Module:
    name: str


@dataclass(frozen=True)
class Class:
    module: str
    node: ast.ClassDef


@dataclass(frozen=True)
class Instance:
    of: Class


@dataclass(frozen=True)
class Function:
    module: str
    node: FunctionNode
    bound: int = 0  # leading parameters that a call does not give


@dataclass(frozen=True)
class Items:
    """Something to iterate over or to look up in; `each` is one of its items, or one type for each of a tuple's."""

    each: "tuple[Type | None, ...]"


@dataclass(frozen=True)
class OneOf:
    types: "tuple[Type, ...]"


@dataclass(frozen=True)
class Outside:
    """What neither we nor vLLM define, by its full name."""

    name: str


Type = Module | Class | Instance | Function | Items | OneOf | Outside


@dataclass(frozen=True)
class Member:
    """One definition of an attribute of a class; `function` is the method whose `self.name = ...` it is."""

    owner: Class
    node: ast.AST
    function: FunctionNode | None = None


@dataclass(frozen=True)
class Place:
    """A line of a file, as `path:line`."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


class Source:
    """Modules of `packages`, each from the first of `roots` that has it."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self._trees: dict[str, tuple[Path, Path, ast.Module] | None] = {}
        self._names: dict[str, dict[str, list[ast.AST]]] = {}
        self._members: dict[Class, dict[str, list[Member]]] = {}
        self._known: dict[object, Type | None] = {}
        self._busy: set[object] = set()

    # ---- modules

    def tree(self, module: str) -> ast.Module | None:
        found = self._load(module)
        return found[2] if found else None

    def path(self, module: str) -> Path | None:
        found = self._load(module)
        return found[1] if found else None

    def place(self, module: str, node: ast.AST | None = None) -> Place:
        found = self._load(module)
        assert found is not None, module
        return Place(str(found[1].relative_to(found[0])), getattr(node, "lineno", 1))

    def _load(self, module: str) -> tuple[Path, Path, ast.Module] | None:
        if module not in self._trees:
            parts = Path(*module.split("."))
            paths = [(root, root / each) for root in self.roots for each in (f"{parts}.py", parts / "__init__.py")]
            found = next(((root, path) for root, path in paths if path.is_file()), None)
            self._trees[module] = (*found, ast.parse(found[1].read_bytes())) if found else None
        return self._trees[module]

    def names(self, module: str) -> dict[str, list[ast.AST]]:
        """What a module binds outside of functions and classes, in order."""
        if module not in self._names:
            tree = self.tree(module)
            self._names[module] = bindings(tree.body) if tree else {}
        return self._names[module]

    def remembered(self, key: object, infer: "Callable[[], Type | None]") -> Type | None:
        """The result of `infer`, once for each key; None inside of itself, where a definition leads to itself."""
        if key in self._known:
            return self._known[key]
        if key in self._busy:
            return None
        self._busy.add(key)
        try:
            found = infer()
        finally:
            self._busy.discard(key)
        if found is not None or not self._busy:  # else it may be unknown only because something else is being inferred
            self._known[key] = found
        return found

    def find(self, module: str, name: str) -> Type | None:
        """What `module.name` is; None if it does not exist or is not known (see `exists`)."""

        def infer() -> Type | None:
            found = (self._binding(module, name, node) for node in self.names(module).get(name, []))
            told = next((each for each in found if each is not None), None)
            return told or (Module(f"{module}.{name}") if self.tree(f"{module}.{name}") else None)

        return self.remembered(("name", module, name), infer)

    def exists(self, module: str, name: str) -> bool:
        """Whether `from module import name` would work."""
        if name in self.names(module) or self.tree(f"{module}.{name}"):
            return True
        tree = self.tree(module)
        if tree is None or "__getattr__" not in self.names(module):
            return False
        # a module that makes its attributes when they are asked for: it knows them by their names
        return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(tree))

    def dotted(self, path: str) -> Type | None:
        """What a full name stands for."""
        module, _, name = path.rpartition(".")
        return self.find(module, name)

    def _binding(self, module: str, name: str, node: ast.AST) -> Type | None:
        if isinstance(node, ast.ImportFrom):
            home = self.absolute(module, node)
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            if self.tree(home) is None:
                return Outside(f"{home}.{original}")
            return self.find(home, original)
        if isinstance(node, ast.Import):
            alias = next(each for each in node.names if (each.asname or each.name.split(".")[0]) == name)
            path = alias.name if alias.asname else alias.name.split(".")[0]
            return Module(path) if self.tree(path) else Outside(path)
        return Scope(self, module).binding(name, node)

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names."""
        if not node.level:
            return node.module or ""
        path = self.path(module)
        package = module.split(".") if path and path.name == "__init__.py" else module.split(".")[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])

    # ---- classes

    def bases(self, owner: Class) -> list[Type]:
        scope = Scope(self, owner.module)
        found = [scope.of(base.value if isinstance(base, ast.Subscript) else base) for base in owner.node.bases]
        built_in = [base.id for base in owner.node.bases if isinstance(base, ast.Name) and hasattr(builtins, base.id)]
        return [*(base for base in found if base is not None), *(Outside(f"builtins.{name}") for name in built_in)]

    def members(self, owner: Class) -> dict[str, list[Member]]:
        """Attributes of a class and of all classes that it extends."""
        if owner not in self._members:
            self._members[owner] = {}
            inherited: dict[str, list[Member]] = {}
            for base in reversed(self.bases(owner)):
                if isinstance(base, Class):
                    inherited |= self.members(base)
            own: dict[str, list[Member]] = {}
            for name, nodes in bindings(owner.node.body).items():
                own[name] = [Member(owner, node) for node in nodes]
            for method in owner.node.body:
                if isinstance(method, FunctionNode):
                    for name, node in _assigned_to_self(method):
                        if not any(member.function is None for member in own.get(name, [])):
                            own.setdefault(name, []).append(Member(owner, node, method))
            self._members[owner] = inherited | own
        return self._members[owner]

    def has(self, owner: Class, name: str) -> bool:
        """Whether instances have the attribute, by itself or through a class that neither we nor vLLM define."""
        members = self.members(owner)
        return (
            name in members or "__getattr__" in members or any(_really_has(base, name) for base in self._outside(owner))
        )

    def _outside(self, owner: Class) -> Iterator[Outside]:
        yield Outside("builtins.object")
        for base in self.bases(owner):
            if isinstance(base, Outside):
                yield base
            elif isinstance(base, Class):
                yield from self._outside(base)

    def attribute(self, base: Type | None, name: str) -> Type | None:
        """The type of `base.name`, None if it is not known."""
        if isinstance(base, Module):
            return self.find(base.name, name)
        if isinstance(base, Outside):
            return Outside(f"{base.name}.{name}")
        if isinstance(base, OneOf):
            return one_of(self.attribute(each, name) for each in base.types)
        if not isinstance(base, Class | Instance):
            return None
        owner = base.of if isinstance(base, Instance) else base
        return one_of(self._member_type(each, isinstance(base, Instance)) for each in self.members(owner).get(name, []))

    def _member_type(self, member: Member, of_instance: bool) -> Type | None:
        node, module = member.node, member.owner.module
        if isinstance(node, FunctionNode):
            kinds = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            if kinds & {"property", "cached_property"}:
                return self.returned(Function(module, node), Instance(member.owner))
            bound = 0 if "staticmethod" in kinds else int(of_instance or "classmethod" in kinds)
            return Function(module, node, bound)
        scope = Scope(self, module)
        if member.function is not None:
            scope = Scope(self, module, member.function, scope, Instance(member.owner))
        return self.remembered(("member", node), lambda: scope.value_of(node, None))

    def returned(self, function: Function, this: Instance | None = None) -> Type | None:
        """What a call returns; of a coroutine, what awaiting it does."""
        module = Scope(self, function.module)
        scope = Scope(self, function.module, function.node, module, this)

        def infer() -> Type | None:
            if function.node.returns is not None and (told := module.annotated(function.node.returns)):
                return told
            results = [node.value for node in ast.walk(function.node) if isinstance(node, ast.Return) and node.value]
            return scope.of(results[0]) if len(results) == 1 else None

        return self.remembered(("returned", function.node, this), infer)


def one_of(types: "Iterator[Type | None]") -> Type | None:
    """Their union; those that are not known are left out."""
    known = tuple(dict.fromkeys(each for each in types if each is not None))
    return (known[0] if len(known) == 1 else OneOf(known)) if known else None


def bindings(body: list[ast.stmt]) -> dict[str, list[ast.AST]]:
    """The nodes that bind each name in a block, without those inside of functions and classes."""
    found: dict[str, list[ast.AST]] = {}

    def visit(node: ast.AST) -> None:
        for name in _bound_by(node):
            found.setdefault(name, []).append(node)
        if not isinstance(node, FunctionNode | ast.ClassDef | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                visit(child)

    for statement in body:
        visit(statement)
    return found


def _bound_by(node: ast.AST) -> list[str]:
    """The names that one node binds, without its children."""
    targets: list[ast.AST] = []
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.split(".")[0] for alias in node.names]
        case ast.Assign():
            targets = [each for each in node.targets if isinstance(each, ast.Name | ast.Tuple | ast.List)]
        case ast.AnnAssign(target=ast.Name()) | ast.NamedExpr() | ast.For() | ast.AsyncFor() | ast.comprehension():
            targets = [node.target]
        case ast.withitem() if node.optional_vars is not None:
            targets = [node.optional_vars]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _assigned_to_self(method: FunctionNode) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(method):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        for target in targets:
            for each in ast.walk(target):
                match each:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        yield name, node


def _really_has(base: Outside, name: str) -> bool:
    module, _, attribute = base.name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute)
        return hasattr(kind, name) or any(name in vars(each) for each in getattr(kind, "__mro__", ()))
    except (ImportError, AttributeError):
        return True  # a package that is not installed here: nothing can be said


class Scope:
    """The names that an expression sees: of a function, of those around it, of its module."""

    def __init__(
        self,
        source: Source,
        module: str,
        function: FunctionNode | None = None,
        parent: "Scope | None" = None,
        this: Instance | None = None,
    ) -> None:
        self.source, self.module, self.function, self.parent, self.this = source, module, function, parent, this
        self.narrowed: dict[str, Type] = {}  # by isinstance, where one is now
        self._busy: set[int] = set()

    @cached_property
    def bound(self) -> dict[str, list[ast.AST]]:
        return bindings(self.function.body) if self.function else {}

    @cached_property
    def parameters(self) -> dict[str, ast.arg]:
        if self.function is None:
            return {}
        arguments = self.function.args
        return {each.arg: each for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}

    def name(self, name: str) -> Type | None:
        """What a name stands for here."""
        if name in self.narrowed:
            return self.narrowed[name]
        if self.function is None:
            return self.source.find(self.module, name)
        if name in self.parameters:
            annotation = self.parameters[name].annotation
            if annotation is None:
                first = next(iter(self.parameters))
                return self.this if name == first and name in ("self", "cls") else None
            return self.annotated(annotation)
        if name in self.bound:
            return one_of(self.binding(name, node) for node in self.bound[name])
        return self.parent.name(name) if self.parent else None

    def binding(self, name: str, node: ast.AST) -> Type | None:
        """The type that one binding of `name` gives it."""
        if id(node) in self._busy:
            return None
        self._busy.add(id(node))
        try:
            if isinstance(node, ast.Import | ast.ImportFrom):
                return self.source._binding(self.module, name, node)
            return self.value_of(node, name)
        finally:
            self._busy.discard(id(node))

    def value_of(self, node: ast.AST, name: str | None) -> Type | None:
        """What the statement `node` binds to `name`; to its single target, if None."""
        if isinstance(node, ast.ClassDef):
            return Class(self.module, node)
        if isinstance(node, FunctionNode):
            return Function(self.module, node)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation) or (self.of(node.value) if node.value else None)
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            return _part(node.target, name, self.item(self.of(node.iter)))
        if isinstance(node, ast.Assign):
            return _part(node.targets[0], name, self.of(node.value)) if name else self.of(node.value)
        return None

    def item(self, items: Type | None) -> Type | None:
        if isinstance(items, OneOf):
            return one_of(self.item(each) for each in items.types)
        return one_of(iter(items.each)) if isinstance(items, Items) else None

    def of(self, node: ast.expr) -> Type | None:  # noqa: C901  one case for each kind of expression
        """The type of an expression."""
        match node:
            case ast.Name():
                return self.name(node.id)
            case ast.Attribute():
                return self.source.attribute(self.of(node.value), node.attr)
            case ast.Await() | ast.Starred() | ast.NamedExpr():
                return self.of(node.value)
            case ast.IfExp():
                return one_of(self.of(each) for each in (node.body, node.orelse))
            case ast.BoolOp():
                return one_of(self.of(each) for each in node.values)
            case ast.Tuple() | ast.List():
                return Items(tuple(self.of(each) for each in node.elts))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return Items((self.of(node.elt),))
            case ast.Subscript():
                items, key = self.of(node.value), getattr(node.slice, "value", None)
                if isinstance(items, Items) and isinstance(key, int) and len(items.each) > 1:
                    return items.each[key] if key < len(items.each) else None
                return items if isinstance(node.slice, ast.Slice) else self.item(items)
            case ast.Call():
                return self._called(node)
        return None

    def _called(self, node: ast.Call) -> Type | None:
        function, arguments = node.func, node.args
        if isinstance(function, ast.Name) and arguments:
            if function.id == "cast":
                return self.of(arguments[1])
            if function.id in SAME_ITEMS:
                return self.of(arguments[0])
            if function.id == "type":
                instance = self.of(arguments[0])
                return instance.of if isinstance(instance, Instance) else None
            if function.id == "getattr" and isinstance(arguments[1], ast.Constant):
                return self.source.attribute(self.of(arguments[0]), str(arguments[1].value))
        if isinstance(function, ast.Name) and function.id == "super":
            this = self.name("self")
            bases = self.source.bases(this.of) if isinstance(this, Instance) else []
            return one_of(Instance(base) for base in bases if isinstance(base, Class))
        if isinstance(function, ast.Attribute) and function.attr in ("values", "copy", "get", "pop"):
            items = self.of(function.value)
            if isinstance(items, Items):
                return items if function.attr in ("values", "copy") else self.item(items)
        return self.result(self.of(function))

    def result(self, called: Type | None) -> Type | None:
        """What calling it gives."""
        if isinstance(called, OneOf):
            return one_of(self.result(each) for each in called.types)
        if isinstance(called, Class):
            return Instance(called)
        return self.source.returned(called) if isinstance(called, Function) else None

    def annotated(self, node: ast.expr) -> Type | None:
        """The type that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.annotated(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):
            return one_of(self.annotated(each) for each in (node.left, node.right))
        if isinstance(node, ast.Subscript):
            return self._generic(node)
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        named = self.of(node)
        if isinstance(named, Class):
            return Instance(named)
        return named if isinstance(named, Instance | Items | OneOf | Function) else self._alias(node)

    def _alias(self, node: ast.expr) -> Type | None:
        """`Name = Annotated[...]` in this module or in another that it imports."""
        module, name = self.module, ast.unparse(node)
        if isinstance(node, ast.Attribute):
            home = self.of(node.value)
            if not isinstance(home, Module):
                return None
            module, name = home.name, node.attr
        for _ in range(4):
            for found in self.source.names(module).get(name, []):
                if isinstance(found, ast.Assign) and isinstance(found.value, ast.Subscript):
                    return Scope(self.source, module).annotated(found.value)
                if isinstance(found, ast.ImportFrom):
                    module = self.source.absolute(module, found)
                    break
            else:
                return None
        return None

    def _generic(self, node: ast.Subscript) -> Type | None:
        kind = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if kind == "Annotated":
            names = [each.value for each in inner[1:] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            told = self.source.dotted(names[0]) if names and re.match(r"vllm\.", names[0]) else None
            if isinstance(told, Class) and ast.unparse(inner[0]) != "type":
                return Instance(told)
            return told or self.annotated(inner[0])
        if kind in ONE_ARGUMENT:
            return self.annotated(inner[0])
        if kind in ("type", "Type"):
            instance = self.annotated(inner[0])
            return instance.of if isinstance(instance, Instance) else None
        if kind.casefold() in VALUES or kind in VALUES:
            return Items((self.annotated(inner[-1]),))
        if kind.casefold() in ELEMENTS or kind in ELEMENTS:
            return Items(tuple(self.annotated(each) for each in (inner if kind == "tuple" else inner[:1])))
        generic = self.of(node.value)
        return Instance(generic) if isinstance(generic, Class) else None


def _part(target: ast.AST, name: str | None, value: Type | None) -> Type | None:
    """What of `value` an assignment to `target` gives to `name`."""
    if isinstance(target, ast.Name):
        return value
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, Items):
        for position, each in enumerate(target.elts):
            if isinstance(each, ast.Name) and each.id == name:
                return value.each[min(position, len(value.each) - 1)] if value.each else None
    return None
