"""What we need of vLLM beyond names that Python resolves: environment variables, flags, plugin groups, routes.

The first three are collected from our own source. The table below is for the rest: a text that must still be in our
file, and the pattern of what serves it in the release's. Called by `releases.py`; results as in `uses.py`.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.contract.source import Function, Place
from tests.contract.uses import PACKAGES, Contract

OWN_VARIABLES = {"VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_BRIDGE_CONFIG_PATH"}  # the ancestor's, read by our code alone
COMMAND_LINES = (
    "example_trainer/vllm_api_server.py",
    "example_trainer/bridges/restart.py",
)  # for vLLM's parser
ENTRY, MODELS = "vllm/entrypoints", "vllm/model_executor/models"
ENDPOINT = "vllm_patching/endpoint.py"
COMPAT = "vllm_patching/compat/vllm_"


class Row(NamedTuple):
    """`text` in our file `ours` needs `pattern` in a file under `theirs`."""

    ours: str
    text: str
    theirs: str
    pattern: str


def route(path: str, ours: str = "vllm_patching/http/gate.py") -> Row:
    """A route of vLLM's that we call or let pass."""
    return Row(ours, f'"{path}"', ENTRY, rf'"{path}"')


TABLE = (
    route("/tokenize"),
    route("/detokenize"),
    route("/ping"),
    route("/v1/load_lora_adapter"),
    route("/v1/unload_lora_adapter"),
    route("/health", "vllm_patching/http/engine_watch.py"),
    route("/inference/v1/generate", "atroposlib/wire/sessions.py"),
    route("/v1/models", "atroposlib/wire/sessions.py"),
    route("/v1/completions", "atroposlib/testing/fake_inference_server.py"),
    route("/v1/chat/completions", "atroposlib/testing/fake_inference_server.py"),
    # the contract of an endpoint plugin, and that init_state comes after vLLM's own
    Row(ENDPOINT, "def attach_router(self, app", "vllm", r"def attach_router\(self, app\b"),
    Row(ENDPOINT, "required_tasks = ", "vllm", r"\brequired_tasks: "),
    Row(ENDPOINT, "state: Any, args", ENTRY, r"init_endpoint_plugins_state\(engine_client, state, args\)"),
    Row(ENDPOINT, "state.openai_serving_models", ENTRY, r"state\.openai_serving_models = "),
    # who may come in: the keys as vLLM reads them, and that it serves the very app whose middleware we wrap
    Row(COMPAT + "server.py", "args.api_key or [envs", ENTRY, r"args\.api_key or \[envs\.VLLM_API_KEY\]"),
    Row(ENDPOINT, "self._app.middleware_stack = ", ENTRY, r"await serve_http\(\s*app,"),
    # structured outputs: the fields of the backend's base, and that every route comes by what is hooked
    Row(COMPAT + "requests.py", "vocab_size=vocabulary", "vllm/v1/structured_output", r"^    vocab_size: int"),
    Row(COMPAT + "requests.py", "._validate_structured_outputs", "vllm", r"self\._validate_structured_outputs\("),
    Row(COMPAT + "requests.py", ".__post_init__", "vllm/sampling_params.py", r"^    def __post_init__\(self\):"),
    Row(COMPAT + "requests.py", "sampling_params: obj", "vllm/v1/engine/async_llm.py", r"^ {8}sampling_params: S"),
    # by name, so that no import shows them
    Row(COMPAT + "kernels.py", "home.log_softmax", "vllm/model_executor", r"^def log_softmax\(input: .*, dim: "),
    Row(COMPAT + "requests.py", "mm_features=None", "vllm/v1/engine/__init__.py", r"^    mm_features: .*None"),
    Row(COMPAT + "requests.py", "prompt_embeds=None", "vllm/v1/engine/__init__.py", r"^    prompt_embeds: .*None"),
    Row("vllm_patching/memory/mapping.py", "packed_modules_mapping", f"{MODELS}/llama.py", "packed_modules_mapping ="),
    Row(COMPAT + "engine.py", '"keep"', "vllm/v1/engine", r'"keep"'),
    Row("vllm_patching/engines/base.py", '"abort"', "vllm/v1/engine", r'"abort"'),
    Row(COMMAND_LINES[0], "args.worker_cls = ", "vllm/v1/worker", r"config\.worker_cls"),
)  # fmt: skip


def check(contract: Contract) -> None:
    """Look everything up in `contract`'s release, and note it there."""
    variables = set(_matches(contract.wheel / "vllm", r"\bVLLM_[A-Z0-9_]+\b"))
    groups = set(_matches(contract.wheel / "vllm", r"\bvllm\.[a-z_]+_plugins\b"))
    for path, node, text in _constants(contract.ours):
        ours = Place(str(path.relative_to(contract.ours)), node.lineno)
        if re.fullmatch(r"VLLM_[A-Z0-9_]+", text) and text not in OWN_VARIABLES:
            why = None if text in variables else "no file reads this variable"
            contract.used(ours, f"the variable {text}", Place("vllm/envs.py", 1), why)
        elif re.fullmatch(r"vllm\.[a-z_]+_plugins", text):
            _group(contract, ours, text, groups)
    project = contract.ours / "pyproject.toml"
    for line, text in enumerate(project.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.match(r'\[project\.entry-points\."(vllm\.\w+)"\]', text):
            _group(contract, Place(project.name, line), match[1], groups)
    assert any(name.startswith("vllm.") for name in tomllib.loads(project.read_text())["project"]["entry-points"])
    _flags(contract)
    for row in TABLE:
        _row(contract, row)


def _group(contract: Contract, ours: Place, name: str, groups: set[str]) -> None:
    why = None if name in groups else "no file loads this group"
    contract.used(ours, f"the entry points {name}", Place("vllm/plugins/__init__.py", 1), why)


def _flags(contract: Contract) -> None:
    parser = contract.source.find("vllm.entrypoints.cli.serve", "make_arg_parser")
    assert isinstance(parser, Function)
    theirs = contract.source.place(parser.module, parser.node)
    for file in COMMAND_LINES:
        tree = ast.parse((contract.ours / file).read_text(encoding="utf-8"))
        own = {
            str(each.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
            for each in node.args
            if isinstance(each, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch("--[a-z-]+", node.value):
                name = node.value.removeprefix("--").replace("-", "_")
                if node.value not in own | {"--help", "--version"}:
                    why = None if name in contract.flags else "it parses no such flag"
                    contract.used(Place(file, node.lineno), f"the flag {node.value}", theirs, why)


def _row(contract: Contract, row: Row) -> None:
    lines = (contract.ours / row.ours).read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if row.text in text), None)
    if line is None:
        raise AssertionError(f"{row.ours} has no {row.text!r} any more: correct the row in {Path(__file__).name}")
    place = next(_places(contract.wheel, row.theirs, row.pattern), None)
    why = None if place else f"nothing matches {row.pattern}"
    contract.used(Place(row.ours, line), row.text, place or Place(row.theirs, 1), why)


def _places(wheel: Path, where: str, pattern: str) -> Iterator[Place]:
    for path in [wheel / where] if where.endswith(".py") else sorted((wheel / where).rglob("*.py")):
        if path.is_file() and (found := re.search(pattern, text := path.read_text(encoding="utf-8"), re.MULTILINE)):
            yield Place(str(path.relative_to(wheel)), text.count("\n", 0, found.start()) + 1)


def _matches(directory: Path, pattern: str) -> Iterator[str]:
    for path in directory.rglob("*.py"):
        yield from re.findall(pattern, path.read_text(encoding="utf-8"))


def _constants(ours: Path) -> Iterator[tuple[Path, ast.Constant, str]]:
    for package in PACKAGES:
        for path in sorted((ours / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "VLLM_" in text or "vllm." in text:
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield path, node, node.value
