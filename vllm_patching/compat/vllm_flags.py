"""The names of the flags of `vllm serve`, read from the release's source: importing vLLM takes seconds."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ENGINE = "engine/arg_utils.py"  # its classes have a field for each flag of the engine
SERVER = "entrypoints/**/cli_args.py"  # the same of the HTTP server; it moved in 0.29 and in 0.33


def installed_flags() -> frozenset[str]:
    """Return the names of the installed vLLM's flags, as `flags_of` does; none without vLLM."""
    spec = find_spec("vllm")
    return frozenset[str]().union(
        *(flags_of(Path(found)) for found in (spec and spec.submodule_search_locations) or ())
    )


def flags_of(vllm: Path) -> frozenset[str]:
    """Return the names of the flags of the vLLM in a directory, with underscores; none if it keeps them elsewhere."""
    files = [[vllm / ENGINE], sorted(vllm.glob(SERVER))]
    if not all(found and found[0].is_file() for found in files):
        return frozenset()
    return frozenset(name for found in files for path in found for name in flags_in(path))


def flags_in(source: Path) -> Iterator[str]:
    """Yield the names in a source file that can be flags: annotated ones, and words with two dashes."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Constant(value=str(text)) if re.fullmatch("--[a-z][a-z0-9-]*", text):
                yield text[2:].replace("-", "_")
