"""Compat mode of an environment's command line: what Atropos 0.4.0 accepted is accepted.

    python environment.py serve --compat --config old.yaml        or `compat: true` in the file

A key that YAML holds and nothing knows is ignored with a warning, wherever it is and whatever it resembles. Items may
fail without end. Without it, `cli.py` refuses such keys, and a run ends after too many failures.
"""

from collections.abc import Mapping

NEGATIONS = ("false", "no", "off", "0")
# Settings of an environment that hold in this mode, unless `config_init`, YAML or a flag says otherwise: no limits.
DEFAULTS = {"max_failed_items": 100, "max_fruitless_items": 0}


def is_on(asked: object, content: Mapping[str, object]) -> bool:
    """Return whether the flag, or else the YAML file, asks for compat mode."""
    return str(content.get("compat", False) if asked is None else asked).lower() not in NEGATIONS
