"""Reads YAML that people write, or somebody sent: whatever is wrong with it is a YAMLError."""

import errno
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MOST_BYTES = 2**22  # of a file; one that people write has thousands, and /dev/zero has no end
MOST_LEVELS = 64  # of nesting
MOST_VALUES = 100_000  # with those that aliases stand for


class _Size(NamedTuple):
    levels: int
    values: int


class Loader(yaml.SafeLoader):
    """Refuses an alias within what it names, and what is nested too deeply or holds too many values; gives the place of
    a value that is not what its form or its tag says, such as 2001-99-99, of half a surrogate pair, and of an integer
    that is larger than every float.
    """

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._level = 0
        self._sizes: dict[yaml.Node, _Size] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        self._level += 1
        self._expect(self._level <= MOST_LEVELS, f"more than {MOST_LEVELS} levels of nesting", mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None:
            self._expect(node in self._sizes or not is_alias, "an alias stands within what it names", mark)
            size = self._sizes.setdefault(node, self._size_of(node))
            self._expect(self._level + size.levels <= MOST_LEVELS, f"more than {MOST_LEVELS} levels of nesting", mark)
            self._expect(size.values <= MOST_VALUES, f"more than {MOST_VALUES} values, with those of aliases", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                float(value)
            elif isinstance(value, str):
                value.encode()
            return value
        except (ValueError, LookupError, AttributeError, OverflowError):
            what = f"a value that cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(problem=what, problem_mark=node.start_mark) from None

    def _size_of(self, node: yaml.Node) -> _Size:
        if isinstance(node, yaml.ScalarNode):
            return _Size(1, 1)
        inner = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        sizes = [self._sizes[part] for part in inner if part in self._sizes]
        return _Size(1 + max((each.levels for each in sizes), default=0), 1 + sum(each.values for each in sizes))

    @staticmethod
    def _expect(is_so: bool, fault: str, mark: yaml.Mark) -> None:
        if not is_so:
            raise yaml.composer.ComposerError(problem=fault, problem_mark=mark)


def read_yaml(text: str | bytes) -> Any:
    """What a text holds as YAML. Raises YAMLError."""
    return yaml.load(text, Loader)


def text_of(path: Path) -> str:
    """Read what people write, from a file or a pipe. Raises UnicodeDecodeError, and OSError, also for a longer one."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes, which no configuration has", str(path))
    return content.decode()
