"""The YAML files of a run directory: run.yaml, which has what was chosen, and each service's own with its defaults."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atroposlib.view.run_data.files import note, read_small, reason_of
from atroposlib.view.run_data.rows import finite

YAML_BYTES = 64 << 10  # of a file; the launcher writes a few
MAX_SETTINGS = 2000

Tree = dict[str, object]


@dataclass(frozen=True)
class _Parsed:
    """A file as it was when it was last changed."""

    changed: tuple[int, int, int]
    value: Tree
    problem: str


class SettingsFiles:
    """Of the run in directory `path`. Each file is parsed once for each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parsed: dict[str, _Parsed] = {}

    def of(self, name: str, problems: list[str] | None = None) -> Tree:
        """Return what `name`.yaml holds, empty if there is none; why it cannot be read is a problem."""
        path = self._path / f"{name}.yaml"
        try:
            found = path.lstat()
        except (OSError, ValueError):
            return {}
        changed = (found.st_ino, found.st_mtime_ns, found.st_size)
        if name not in self._parsed or self._parsed[name].changed != changed:
            self._parsed[name] = _Parsed(changed, *_parsed(path))
        if self._parsed[name].problem:
            note(problems, self._parsed[name].problem)
        return self._parsed[name].value

    def chosen(self) -> dict[str, object]:
        """run.yaml with dots between its keys."""
        return _flat(self.of("run"))

    def resolved(self) -> dict[str, object]:
        """Every setting of the services, defaults included, by the names of run.yaml; of vLLM what the launcher gives
        to the one server.
        """
        trainer, vllm = dict(self.of("trainer")), self.of("vllm")
        tree: Tree = {"bridge": trainer.pop("bridge", None), "trainer": trainer, "api": self.of("api"), "vllm": vllm}
        tree["dtype"] = vllm.get("dtype")
        environments = self.of("run").get("environments")
        names = [str(name) for name in environments] if isinstance(environments, dict) else []
        known = {name: self.of(name if len(names) > 1 else "env") for name in names if name.isprintable()}
        tree["environments"] = {name: each.get("env") for name, each in known.items() if "/" not in name}
        return {name: value for name, value in _flat(tree).items() if value is not None}


def read_yaml(content: bytes) -> Tree:
    """The mapping of a YAML file that may be hostile, or what its list of flags says. Raises ValueError,
    RecursionError.
    """
    import yaml

    from atroposlib.yaml_text import Loader

    class WithoutAlias(Loader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias, which could stand for any amount of text")
            return super().compose_node(parent, index)

    try:
        found = yaml.load(content, WithoutAlias)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return found if isinstance(found, dict) else _of_flags(found) if isinstance(found, list) else {}


def _of_flags(words: list[object]) -> Tree:
    """`[--max-model-len, '256', --enable-lora]` by the names of a run file."""
    texts = [word if isinstance(word, str) else "" for word in words]
    following = ["" if text.startswith("--") else text for text in [*texts[1:], ""]]
    return {
        name.removeprefix("--").replace("-", "_"): _given(text)
        for name, text in zip(texts, following, strict=True)
        if name.startswith("--")
    }


def _given(text: str) -> object:
    """What stands behind a flag, as a run file has it."""
    with suppress(msgspec.DecodeError, UnicodeError):
        number = msgspec.json.decode(text, type=int | float)
        return text if finite(number) is None else number
    return text or True


def _parsed(path: Path) -> tuple[Tree, str]:
    """Return what a YAML file holds, and why it cannot be read."""
    try:
        return read_yaml(read_small(path, YAML_BYTES)), ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {reason_of(error)}"


def _flat(tree: Tree) -> dict[str, object]:
    found: dict[str, object] = {}
    _flatten(tree, "", found)
    return found


def _flatten(value: object, name: str, found: dict[str, object]) -> None:
    if len(found) >= MAX_SETTINGS:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            _flatten(each, f"{name}.{key}" if name else str(key), found)
    else:
        found[name] = value if isinstance(value, str | int | float | bool | None) else str(value)
