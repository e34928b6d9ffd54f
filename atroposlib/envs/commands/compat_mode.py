"""Compat mode of an environment's command line: what Atropos 0.4.0 accepted is accepted.

    python environment.py serve --compat --config old.yaml        or `compat: true` in the file

A key that YAML holds and nothing knows is ignored with a warning, wherever it is and whatever it resembles. Items may
fail without end. Without it, `cli.py` refuses such keys, and a run ends after too many failures.
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from atroposlib.flags import names
from atroposlib.logs import get_logger

log = get_logger(__name__)

NEGATIONS = ("false", "no", "off", "0")
# Settings of an environment that hold in this mode, unless `config_init`, YAML or a flag says otherwise: no limits.
DEFAULTS = {"max_failed_items": 100, "max_fruitless_items": 0}


def is_on(arguments: Sequence[str], content: Mapping[str, Any]) -> bool:
    """Return whether the flags, or else the YAML file, ask for compat mode."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compat", nargs="?", const="true", default=str(content.get("compat", False)))
    parser.add_argument("--no-compat", "--no_compat", dest="compat", action="store_const", const="false")
    asked: str = parser.parse_known_args(list(arguments))[0].compat
    return asked.lower() not in NEGATIONS


def known_keys(content: Mapping[str, Any], kinds: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """`content` without the keys that are unknown. `kinds` are the classes by place: "" is the top, then "env", ..."""
    known: dict[str, Any] = _known(content, kinds[""], "")
    return known | {key: _known(known[key], kinds[key], f"{key}.") for key in known.keys() & kinds.keys()}


def _known(values: Any, kind: type[BaseModel], place: str) -> Any:
    if isinstance(values, list):
        return [_known(each, kind, place) for each in values]
    if not isinstance(values, Mapping):
        return values
    known = {spelling for name, field in kind.model_fields.items() for spelling in names(name, field)}
    for key in values.keys() - known:
        log.warning("Ignoring the unknown key '%s%s' (compat mode)", place, key)
    return {key: value for key, value in values.items() if key in known}
