"""The size of the code in a few counts, so that a refactoring can be compared with what it replaced.

    python benchmarks/code_size.py [CHECKOUT]    of this project; default: the one that this file is in

Product code is every tracked Python file outside tests/, benchmarks/ and docs/. Statements are counted by the parser,
so wrapping a line changes nothing; a circle is a set of modules that import each other, directly or not.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

PACKAGES = ("atropos_launcher", "atroposlib", "environments", "example_trainer", "sampler_doctor", "vllm_patching")
OUTSIDE = {"tests", "benchmarks", "docs"}
WIDEST = 120
# In brackets, so that this file is not one of those that it counts.
MODES = re.compile(r"shared_vll[m]|lora_onl[y]|lora_restar[t]")
DIES_WITH_PARENT, PROCESS_STATE = re.compile(r"PR_SET_PDEATHSI[G] ="), re.compile(r"/proc/\{?\w+\}?/sta[t]\b")
GROUP_SIGNAL, NEW_SESSION = re.compile(r"os\.killpg[(]"), re.compile(r"start_new_session=Tru[e]")
# With these words a docstring begins as a fragment.
FRAGMENT = re.compile(r"(What|Whether|Of|Those|How|As|Why|Where|Which|Its|Around)\b")


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """The sets of modules that import each other when they are loaded or later."""
    found = set()
    for module in graph.modules:
        circle = graph.find_downstream_modules(module) & graph.find_upstream_modules(module)
        if circle:
            found.add(frozenset({module, *circle}))
    return sorted(sorted(circle) for circle in found)


def counts(root: Path) -> Iterator[tuple[str, str]]:
    """Name and value of each count."""
    texts = dict(_tracked(root))
    product = {path: text for path, text in texts.items() if path.suffix == ".py" and path.parts[0] not in OUTSIDE}
    nodes = [node for text in product.values() for node in ast.walk(ast.parse(text))]
    tries = sum(isinstance(node, ast.Try) for node in nodes)
    lines = sum(text.count("\n") for text in product.values())
    code = [text for path, text in texts.items() if path.suffix != ".toml"]
    wide = [line for text in code for line in text.splitlines() if len(line) > WIDEST]
    naming = [str(path) for path, text in texts.items() if path.parts[0] != "tests" and MODES.search(text)]
    yield "files of product code", f"{len(product)}"
    yield "lines", f"{lines}"
    tests = sum(text.count("\n") for path, text in texts.items() if path.suffix == ".py" and path.parts[0] == "tests")
    yield "lines of tests", f"{tests}"
    yield "modules in the largest directory", _largest(product)
    yield "files that have the kernel end a process with its parent", f"{_matching(product, DIES_WITH_PARENT)}"
    yield "files that read the state of a process", f"{_matching(product, PROCESS_STATE)}"
    yield "files that signal a process group", f"{_matching(product, GROUP_SIGNAL)}"
    yield "files that start a process in a session of its own", f"{_matching(product, NEW_SESSION)}"
    names = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    yield "Any", f"{names}, {1000 * names / lines:.1f} per 1,000 lines"
    written = [text for node in nodes if (text := _docstring(node))]
    fragments = sum(FRAGMENT.match(text) is not None for text in written)
    yield (
        "docstrings that begin as a fragment",
        f"{fragments} of {len(written)}, {100 * fragments / len(written):.0f} %",
    )
    yield "statements", f"{sum(isinstance(node, ast.stmt) for node in nodes)}"
    yield "try", f"{tries}, {1000 * tries / lines:.1f} per 1,000 lines"
    yield "dict[str, Any]", f"{sum(text.count('dict[str, Any]') for text in product.values())}"
    yield "files that name a bridge mode", f"{len(naming)}: {' '.join(naming)}"
    yield f"lines wider than {WIDEST}, Python and shell, with tests", f"{len(wide)}"


def _largest(product: Iterable[Path]) -> str:
    sizes = Counter(path.parent for path in product if path.name != "__init__.py")
    return ", ".join(f"{count} {folder}" for folder, count in sizes.most_common(3))


def _matching(product: dict[Path, str], pattern: re.Pattern[str]) -> int:
    return sum(pattern.search(text) is not None for text in product.values())


def _docstring(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.get_docstring(node)
    return None


def _tracked(root: Path) -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in map(Path, listed.splitlines()):
        if name.parts[0] != "docs" and (name.suffix in {".py", ".sh", ".toml"} or name.parts[0] == ".ci"):
            yield name, (root / name).read_text()


def main() -> None:
    """Print one count per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1], metavar="CHECKOUT")
    root = parser.parse_args().checkout.resolve()
    for name, value in counts(root):
        print(f"{name}: {value}")
    sys.path.insert(0, str(root))
    found = circles(grimp.build_graph(*PACKAGES, cache_dir=None))
    print(f"import circles: {len(found)}", *map(" ".join, found), sep="\n    ")


if __name__ == "__main__":
    main()
