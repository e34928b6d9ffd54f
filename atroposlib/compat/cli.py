"""Helpers for command lines of one's own: models with prefixed fields, nested dicts merged, flags as a dict.

Environments need none of them: `atroposlib.envs.commands.cli` reads their flags.
"""

import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo


def get_prefixed_pydantic_model(base_model: type[BaseModel], prefix: str) -> type[BaseModel]:
    """A model with the fields of `base_model`, each name preceded by `prefix`, such as `env.`."""
    fields: dict[str, Any] = {
        f"{prefix}{name}": (field.annotation, _field(field, field.default))
        for name, field in base_model.model_fields.items()
    }
    return create_model(f"{prefix.capitalize()}{base_model.__name__}", **fields)


def adjust_model_defaults(model_class: type[BaseModel], defaults: Mapping[str, object] | BaseModel) -> type[BaseModel]:
    """A subclass of `model_class` with other defaults; what `defaults` has besides the fields is left out."""
    given = defaults.model_dump() if isinstance(defaults, BaseModel) else defaults
    fields: dict[str, Any] = {
        name: (field.annotation, _field(field, given[name], keep_factory=given[name] is None))
        for name, field in model_class.model_fields.items()
        if name in given
    }
    return create_model(f"{model_class.__name__}WithDefaults", __base__=model_class, **fields)


def merge_dicts(*dicts: Mapping[str, object]) -> dict[str, object]:
    """One dict of several: of a key that occurs twice the later value holds, and two dicts are merged in turn."""
    merged: dict[str, object] = {}
    for each in dicts:
        for key, value in each.items():
            earlier = merged.get(key)
            both = isinstance(earlier, Mapping) and isinstance(value, Mapping)
            merged[key] = merge_dicts(earlier, value) if both else value  # type: ignore[arg-type]
    return merged


def extract_namespace(model: Any, prefix: str) -> dict[str, object]:
    """Return what `model` (a dict, a pydantic model, or anything with `to_dict`) holds under names that begin with
    `prefix`, by the rest of the name. Raises TypeError.
    """
    if isinstance(model, Mapping):
        values = model
    elif isinstance(model, BaseModel):
        values = model.model_dump()
    elif callable(getattr(model, "to_dict", None)):
        values = model.to_dict()
    else:
        raise TypeError(f"expected a dict, a pydantic model or an object with to_dict, not {type(model).__name__}")
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def get_double_dash_flags() -> dict[str, object]:
    """The flags of this process by name: `--key value` and `--key=value` as text, `None` as None, `--key` as True."""
    found: dict[str, object] = {}
    words = sys.argv[1:]
    for place, word in enumerate(words):
        key, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            continue
        following = words[place + 1] if place + 1 < len(words) else "-"
        if not given and following.startswith("-"):
            found[key] = True
        else:
            text = value if given else following
            found[key] = None if text == "None" else text
    return found


def _field(field: FieldInfo, default: object, keep_factory: bool = True) -> object:
    """A field with the description of `field`, and its factory or `default`."""
    if field.default_factory is not None and keep_factory:
        return Field(default_factory=field.default_factory, description=field.description)
    return Field(default=default, description=field.description)
