"""Helpers for command lines, under the path that users of 0.4.0 import."""

import sys
from typing import Any

import pytest
from pydantic import BaseModel, Field

from atroposlib.envs.constants import (  # an old path
    ENV_NAMESPACE,
    NAMESPACE_SEP,
    OPENAI_NAMESPACE,
    SERVER_MANAGER_NAMESPACE,
)
from atroposlib.utils.cli import (  # an old path
    adjust_model_defaults,
    extract_namespace,
    get_double_dash_flags,
    get_prefixed_pydantic_model,
    merge_dicts,
)


class Small(BaseModel):
    size: int = Field(default=4, description="How large.")
    names: list[str] = Field(default_factory=lambda: ["a"])


def test_the_prefixes_are_those_of_the_flags() -> None:
    assert (ENV_NAMESPACE, OPENAI_NAMESPACE, SERVER_MANAGER_NAMESPACE, NAMESPACE_SEP) == (
        "env",
        "openai",
        "server",
        ".",
    )


def test_fields_get_a_prefix_and_keep_type_default_and_description() -> None:
    prefixed = get_prefixed_pydantic_model(Small, "env.")
    fields = prefixed.model_fields
    assert (fields["env.size"].annotation, fields["env.size"].description) == (int, "How large.")
    assert prefixed().model_dump() == {"env.size": 4, "env.names": ["a"]}
    assert extract_namespace(prefixed(**{"env.size": 5}), "env.") == {"size": 5, "names": ["a"]}


@pytest.mark.parametrize("defaults", [{"size": 7, "other": 1}, Small(size=7, names=["b"])], ids=["dict", "model"])
def test_defaults_are_replaced_in_a_subclass(defaults: Any) -> None:
    adjusted = adjust_model_defaults(Small, defaults)
    assert issubclass(adjusted, Small)
    assert adjusted.model_fields["size"].description == "How large."
    assert adjusted().model_dump() == {"size": 7, "names": ["b"] if isinstance(defaults, Small) else ["a"]}
    assert Small().size == 4
    assert adjust_model_defaults(Small, {"names": None})().names == ["a"]


def test_dicts_are_merged_deeply_and_left_as_they_are() -> None:
    first = {"env": {"a": 1, "b": {"c": 2}}, "slurm": False}
    merged = merge_dicts(first, {"env": {"b": {"d": 3}}}, {"slurm": {"on": True}})
    assert merged == {"env": {"a": 1, "b": {"c": 2, "d": 3}}, "slurm": {"on": True}}
    assert first == {"env": {"a": 1, "b": {"c": 2}}, "slurm": False}
    assert merge_dicts() == {}


def test_a_namespace_is_taken_from_dicts_and_objects_alike() -> None:
    class Old:
        def to_dict(self) -> dict[str, int]:
            return {"env.a": 1, "openai.a": 2}

    assert extract_namespace({"env.a": 1, "openai.a": 2}, "openai.") == {"a": 2}
    assert extract_namespace(Old(), "env.") == {"a": 1}
    with pytest.raises(TypeError, match="not int"):
        extract_namespace(3, "env.")


def test_flags_of_the_process_become_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "serve --env.group_size 8 --env.x=-1 --slurm --name None --other=None -v --= --last"
    monkeypatch.setattr(sys, "argv", ["env.py", *words.split()])
    assert get_double_dash_flags() == {
        "env.group_size": "8",
        "env.x": "-1",
        "slurm": True,
        "name": None,
        "other": None,
        "last": True,
    }
