"""The keys of a configuration tree as flags: what `config.py` parses a command line with, and what `--help` prints.

`keys_of` lists every key of a tree once: its path, its spellings, and its section of the help, which is the first line
of the docstring of the class that declares it. argparse splits the command line and formats the help; values stay text
here, and pydantic checks them.
"""

import argparse
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from atroposlib.errors import WRONG_USE, AtroposError, reading
from atroposlib.yaml_text import read_yaml

COLLECTIONS = (list, tuple, set, frozenset, Sequence)
USAGE = "%(prog)s [--config FILE] [--FLAG VALUE ...]"
SWITCHES = ("--help", "--version", "--dry-run")  # of every command
BOOLEANS = ("true", "false")  # what may follow a switch
PLACEHOLDERS = {int: "N", float: "X"}


class ConfigError(AtroposError):
    """A configuration that cannot be used; the message is one line for the person who typed it."""

    exit_status = WRONG_USE


class Repeated:
    """Mark of a list whose flag is given once per item: `Annotated[list[str], Repeated]`. An item may have commas."""


class Hoisted:
    """Mark of a tree whose aliases are keys of the tree above it: `--lora-r` for `bridge.r`."""


@dataclass(frozen=True)
class Key:
    """One value of a tree."""

    path: tuple[str, ...]
    spellings: tuple[str, ...]  # with underscores and dots; the first is the one that is shown
    field: FieldInfo
    section: str

    def answers_to(self, name: str) -> bool:
        """Return whether a flag of that name, with underscores, is this key's."""
        return any(flag.removeprefix("--").replace("-", "_") == name for flag in (*self.flags, *self.negations))

    def is_described_by(self, words: Sequence[str]) -> bool:
        """Return whether the description begins with several words, or the last name of the path has them all, maybe in
        the plural.
        """
        if len(words) < 2:
            return False
        parts = self.path[-1].split("_")
        if {*words} <= {*parts, *(part.removesuffix("s") for part in parts)}:
            return True
        return f"{self.field.description} ".lower().startswith(f"{' '.join(words)} ")

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Return the types that the value may have: the members of a union, or the one type."""
        return _members(self.field)

    @property
    def is_secret(self) -> bool:
        return is_secret(self.field)

    @property
    def is_repeated(self) -> bool:
        return Repeated in self.field.metadata

    @property
    def flags(self) -> list[str]:
        return [_flag(spelling) for spelling in self.spellings]

    @property
    def negations(self) -> list[str]:
        """`--no-x`, `--env.no-x`: of a boolean."""
        if bool not in self.kinds:
            return []
        return [_flag(f"{tree}{dot}no_{leaf}") for tree, dot, leaf in (name.rpartition(".") for name in self.spellings)]

    def value(self, texts: Sequence[str]) -> Any:
        """Return what was typed, repeated flags included, as pydantic takes it: the last text, a list or a mapping."""
        if self.is_repeated:
            return list(texts)
        text = texts[-1]
        if text == "None" and (NoneType in self.kinds or self.field.default is None):
            return None
        if text in (choices := _choices(self.kinds)):
            return choices[text]
        origins = [get_origin(kind) or kind for kind in self.kinds]
        if text[:1] in ("[", "{") and any(origin in (*COLLECTIONS, dict, Mapping) for origin in origins):
            with reading(f"{'.'.join(self.path)}: not JSON", ConfigError):
                return json.loads(text)
        if any(origin in COLLECTIONS for origin in origins):
            given = [item for kind in self.kinds for item in get_args(kind)]
            items, choices = {getattr(item, "__origin__", item) for item in given}, _choices(given)
            parts = [part.strip() for typed in texts for part in typed.split(",")]
            numbers = {part: int(part) for part in parts if int in items and part.removeprefix("-").isdigit()}
            return [choices.get(part, numbers.get(part, part)) for part in parts]
        return text


@dataclass(frozen=True)
class Setting:
    """Holds a flag of a section, whose keys a program of its own knows: `--vllm.max-len 512` is max-len of `vllm`."""

    typed: str
    text: str | None = None  # None: the flag stands alone
    is_joined: bool = False  # by `=`

    @property
    def name(self) -> str:
        return self.typed.replace("-", "_")

    @property
    def value(self) -> Any:
        """Return the text as YAML, or itself where it is none."""
        if self.text is None:
            return True
        try:
            return read_yaml(self.text)
        except yaml.YAMLError:
            return self.text

    def words(self, above: str = "") -> list[str]:
        """Return the flag as it is typed for the program, whose own section is `above`."""
        flag = f"--{above}{self.typed}"
        if self.text is None:
            return [flag]
        return [f"{flag}={self.text}"] if self.is_joined else [flag, self.text]


@dataclass(frozen=True)
class CommandLine:
    """Holds a command line apart: words that stand alone, flags of the command's own keys, and those of sections."""

    words: list[str]
    flags: list[str]
    sections: dict[str, list[Setting]]


def aliases(field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    return [str(choice) for choice in (alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else [])]


def names(name: str, field: FieldInfo) -> list[str]:
    """Every spelling of a field, its own name first."""
    return list(dict.fromkeys([name, *aliases(field)]))


def subtrees(field: FieldInfo) -> list[type[BaseModel]]:
    """The trees that a field may be: none for a plain value, several for a choice."""
    return [kind for kind in _members(field) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def keys_of(tree: type[BaseModel], above: tuple[str, ...] = ()) -> list[Key]:
    """Every key of `tree`, those of its subtrees in their place."""
    return [*_keys_of(tree, above)]


@cache  # a plan of a run asks for those of the same few classes hundreds of times
def _keys_of(tree: type[BaseModel], above: tuple[str, ...]) -> tuple[Key, ...]:
    keys: dict[tuple[str, ...], Key] = {}
    for name, field in tree.model_fields.items():
        path = (*above, name)
        below = [key for subtree in subtrees(field) for key in _keys_of(subtree, path)]
        for key in below or [_key(tree, path, field)]:
            keys.setdefault(key.path, key)
    return tuple(keys.values())


def split(argv: Sequence[str], keys: Sequence[Key] = (), sections: Sequence[str] = ()) -> CommandLine:
    """Take a command line apart. A flag has the next word unless that starts with `--`; a switch of `keys` has none but
    `true` and `false`, since any other word stands alone.
    """
    line = CommandLine([], [], {section: [] for section in sections})
    switches = {*SWITCHES, *(flag for key in keys if key.negations for flag in key.flags)}
    rest = [*argv]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            line.words.append(word)
            continue
        flag, equals, joined = word.partition("=")
        text = joined if equals else None
        if word.startswith("--") and not equals and not _dashed(flag).startswith("--no-") and rest:
            has_value = rest[0] in BOOLEANS if _dashed(flag) in switches else not rest[0].startswith("--")
            has_value = rest[0] == "all" if flag == "--help" else has_value
            text = rest.pop(0) if has_value else None
        section, dot, name = flag[2:].partition(".")
        if dot and section in line.sections:
            line.sections[section].append(Setting(name, text, bool(equals)))
        else:
            line.flags.extend([word] if equals or text is None else [word, text])
    return line


def parse(
    keys: Sequence[Key],
    argv: Sequence[str],
    *,
    prog: str,
    about: str,
    epilog: str = "",
    defaults: Mapping[str, Any] | None = None,
    usage: str = USAGE,
    elsewhere: Callable[[], Mapping[str, Sequence[Key]]] = dict,
    first: Sequence[str] = (),
) -> tuple[dict[str, Any], argparse.Namespace]:
    """The values of `argv` by path, joined by dots, and `config` and `dry_run`. Exits 0 after `--help` and `--version`.

    `elsewhere` has the keys of other programs, which are written PROGRAM.KEY here: for the hint at an unknown flag.
    `first` names the keys that `--help` shows; `--help all` shows every one. Raises ConfigError.
    """
    parser = make_parser(keys, prog, about, epilog, defaults or {}, usage, first)
    try:
        typed, rest = parser.parse_known_args([_dashed(token) for token in argv])
    except argparse.ArgumentError as error:
        flag = str(error.argument_name).split("/")[0]
        if "expected" not in error.message:
            raise ConfigError(f"{flag}: {error.message}") from None
        raise ConfigError(f"{flag} expects a value; write a value that starts with -- as {flag}=VALUE") from None
    if rest and not rest[0].startswith("--"):
        raise ConfigError(f"unexpected argument {rest[0]!r}: flags start with '--'")
    if rest:
        spelled = next(token for token in argv if _dashed(token) == rest[0])[2:].partition("=")[0]
        name = spelled.replace("-", "_")
        where = "--help all" if first else "--help"
        raise ConfigError(f"unknown flag --{spelled}{_hint(name, keys, elsewhere())} ({where} lists them)")
    by_path = {".".join(key.path): key for key in keys}
    values = {
        path: text if isinstance(text, bool) else by_path[path].value([text] if isinstance(text, str) else text)
        for path, text in vars(typed).items()
        if path in by_path
    }
    return values, typed


def early(argv: Sequence[str], *keys: Key) -> dict[str, Any]:
    """Return `config`, and the values of `keys`, before the other keys of the tree are known."""
    # with a name, as argparse would take it of sys.argv[0], which a module under its old path does not have
    parser = argparse.ArgumentParser(prog="", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    for key in keys:
        _add_flag(parser, key)
    return vars(parser.parse_known_args([_dashed(token) for token in argv])[0])


CLOSE = 0.6  # of a misspelt flag and the known one, at least
COMMON = ("dry_run", "config", "help", "version")  # flags of every program, beside its keys


def _hint(name: str, keys: Sequence[Key], elsewhere: Mapping[str, Sequence[Key]]) -> str:
    """`; did you mean 'x'?`: another program's flag of that name, else the shortest that is described by these words or
    has all of them in its name, here before elsewhere, else the closest spelling of all.
    """
    programs = [("", keys), *((f"{program}.", theirs) for program, theirs in elsewhere.items())]
    names = [f"{prefix}{name}" for prefix, theirs in programs if any(key.answers_to(name) for key in theirs)]
    for prefix, known in programs:
        described = [key.spellings[0] for key in known if key.is_described_by(name.split("_"))]
        names += [prefix + each for each in sorted(described, key=len)]
    if names:
        return f"; did you mean '{names[0]}'?"
    spelled = {each: each for each in COMMON}
    for prefix, known in programs:
        for each in (each for key in known for each in key.spellings):
            spelled.setdefault(each, prefix + each)
    close = {each: difflib.SequenceMatcher(None, each, name).ratio() for each in spelled}
    # of those that are about as close, this program's own
    best = max(close, key=lambda each: (round(close[each], 1), spelled[each] == each, close[each]))
    return f"; did you mean '{spelled[best]}'?" if close[best] >= CLOSE else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the closest known key, or an empty string."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""


# --- the parser -----------------------------------------------------------------------------------------------------


class _Help(argparse.HelpFormatter):
    """A flag's spellings, then its placeholder once; an epilog of several lines as it is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text.strip() else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return ", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "")


def _described(about: str) -> str:
    """A docstring of one paragraph without its line breaks, as argparse makes its own; several as they are written."""
    text = cleandoc(about)
    return text if "\n\n" in text else " ".join(text.split())


def make_parser(
    keys: Sequence[Key],
    prog: str,
    about: str,
    epilog: str = "",
    defaults: Mapping[str, object] = MappingProxyType({}),
    usage: str = USAGE,
    first: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """A parser with a flag for every key; its values are text. Its `--help` shows the keys that `first` names, if any,
    and `--help all` every one.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=_described(about),
        epilog=epilog,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
        conflict_handler="resolve",  # a field may be called config or version
        formatter_class=_Help,
    )
    general = parser.add_argument_group("Every command")
    by_path = {".".join(key.path): key for key in keys}
    shown_first = [by_path[path] for path in first if path in by_path]
    short = make_short_parser(shown_first, len(keys), prog, about, epilog, defaults, usage) if shown_first else parser
    general.add_argument(
        "-h",
        "--help",
        action=_ShowHelp,
        nargs="?",
        metavar="all" if shown_first else "",
        short=short,
        help="show the flags to begin with, or all of them" if shown_first else "show this help",
    )
    general.add_argument("--version", action="version", version=f"{prog} {package_version()}", help="show the version")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of the keys below; flags override it")
    general.add_argument("--dry-run", action="store_true", help="print the resolved configuration as YAML and exit")
    title = about.strip().split("\n")[0].rstrip(".")  # a tree's own fields need no section that repeats the description
    sections = {
        section: parser.add_argument_group("Flags" if section == title else section)
        for section in dict.fromkeys(key.section for key in keys)
    }
    for key in keys:
        _add_flag(sections[key.section], key, _help(key, defaults))
    return parser


def make_short_parser(
    keys: Sequence[Key], count: int, prog: str, about: str, epilog: str, defaults: Mapping[str, object], usage: str
) -> argparse.ArgumentParser:
    """A parser whose help has `keys` in one section, and says that there are `count`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=_described(about),
        epilog=f"{prog} has {count} flags: `--help all` lists them.\n\n{epilog}",
        add_help=False,
        formatter_class=_Help,
    )
    general = parser.add_argument_group("Every command")
    general.add_argument("-h", "--help", metavar="all", help="show the flags to begin with, or all of them")
    general.add_argument("--version", action="store_true", help="show the version")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of the keys; flags override it")
    general.add_argument("--dry-run", action="store_true", help="print the resolved configuration as YAML and exit")
    section = parser.add_argument_group("To begin with")
    for key in keys:
        _add_flag(section, key, _help(key, defaults))
    return parser


class _ShowHelp(argparse.Action):
    """Prints the help of `short`, or with the word `all` that of the parser itself, and ends the program."""

    def __init__(self, *args: Any, short: argparse.ArgumentParser, **options: Any) -> None:
        super().__init__(*args, **options)
        self._short = short

    def __call__(self, parser: argparse.ArgumentParser, _namespace: object, values: object, *_option: object) -> None:
        (parser if values == "all" else self._short).print_help()
        parser.exit()


def _add_flag(parser: argparse._ActionsContainer, key: Key, text: str | None = None) -> None:
    path = ".".join(key.path)
    if not key.negations:
        parser.add_argument(*key.flags, dest=path, action="append", metavar=_placeholder(key), help=text)
        return
    shown = ", ".join(["[BOOL]", *key.negations])
    parser.add_argument(*key.flags, dest=path, nargs="?", const=True, metavar=shown, help=text)
    parser.add_argument(*key.negations, dest=path, action="store_const", const=False, help=argparse.SUPPRESS)


def package_version() -> str:
    """That of Atropos as it is installed."""
    return next((installed.version for installed in metadata.distributions(name="atroposlib")), "(not installed)")


def _help(key: Key, defaults: Mapping[str, object]) -> str:
    """Describe what the flag does, and what holds without it: of `defaults`, else of the field."""
    value: Any = defaults
    for part in key.path:
        value = value.get(part, PydanticUndefined) if isinstance(value, Mapping) else PydanticUndefined
    default = key.field.default if value is PydanticUndefined else value
    notes = ["required"] if key.field.is_required() and value is PydanticUndefined else []
    if default not in (PydanticUndefined, None, "", (), []) and not key.is_secret and not key.field.exclude:
        notes = [f"default: {_shown(default)}"]
    extra = key.field.json_schema_extra
    if isinstance(extra, dict) and "env" in extra:
        notes.append(f"variable {extra['env']}")
    noted = f" ({'; '.join(notes)})" if notes else ""
    return f"{key.field.description or ''}{noted}".replace("%", "%%")


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_shown, value))
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _placeholder(key: Key) -> str:
    kind = next((kind for kind in key.kinds if kind is not NoneType), str)
    if key.is_repeated:
        return "TEXT"
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    if (get_origin(kind) or kind) in COLLECTIONS:
        return "A,B,..."
    return PLACEHOLDERS.get(kind, "PATH" if kind is Path else "TEXT")


# --- spelling -------------------------------------------------------------------------------------------------------


def _key(tree: type[BaseModel], path: tuple[str, ...], field: FieldInfo) -> Key:
    """`field` of `tree`; the class that declares it first gives the section, and where trees are a choice the
    description.
    """
    *above, name = path
    owners = [cls for cls in reversed(tree.__mro__) if issubclass(cls, BaseModel) and name in cls.model_fields]
    title = (owners[0].__doc__ or owners[0].__name__).strip().splitlines()[0].rstrip(".")
    if issubclass(tree, Hoisted):
        field = owners[0].model_fields[name]
        hoisted = [".".join([*above[:-1], alias]) for alias in aliases(field)]
        return Key(path, (*hoisted, ".".join(path)), field, title)
    section = f"--{'.'.join(above)}.*: {title}" if above else title
    return Key(path, tuple(".".join([*above, spelling]) for spelling in names(name, field)), field, section)


def _flag(spelling: str) -> str:
    return "--" + spelling.replace("_", "-")


def _dashed(token: str) -> str:
    """`--lora_r=8` as `--lora-r=8`; values and quoted flags of another program stay."""
    flag, equals, value = token.partition("=")
    return token if not token.startswith("--") or " " in flag else flag.replace("_", "-") + equals + value


def _choices(kinds: Sequence[Any]) -> dict[str, Any]:
    """The members of enums and of `Literal`, by each text that stands for one."""
    found: dict[str, Any] = {}
    for kind in kinds:
        if get_origin(kind) is Literal:
            found |= {text: member for member in get_args(kind) for text in (str(member), _shown(member))}
        elif isinstance(kind, type) and issubclass(kind, Enum):
            found |= {_shown(member): member for member in kind} | dict(kind.__members__)
    return found


def is_secret(field: FieldInfo) -> bool:
    """Return whether a field's value must not be shown."""
    return field.repr is False or SecretStr in _members(field)


def _members(field: FieldInfo) -> tuple[Any, ...]:
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
