"""The static check finds each kind of change in vLLM, in a small release that is made up, and names both lines."""

from pathlib import Path

import pytest

from tests.contract.uses import Contract

ENGINE = """\
class Output:
    states: dict[str, "State"]

class State:
    name: str = ""

class Base:
    async def is_paused(self) -> bool: ...

class Engine(Base):
    def __init__(self, config) -> None:
        self.output = Output()

    async def pause(self, mode: str = "abort", *, clear: bool = True) -> None: ...

def rope(size: int, *, base: float) -> None: ...
"""
OURS = """\
from typing import Annotated, Any
from vllm import engine
from vllm.engine import State, rope
from vllm_patching.version import VERSION
from packaging.version import Version

Client = Annotated[Any, "vllm.engine.Engine"]

async def use(client: Client, thing: object) -> list[str]:
    await client.pause(mode="keep", clear=True)
    await client.is_paused()
    rope(4, base=1.0)
    if VERSION >= Version("0.30"):
        client.later()
    if isinstance(thing, State):
        thing.name = "x"
    if hasattr(client, "optional"):
        client.optional = True
    getattr(client, "maybe", None)
    return [state.name for state in client.output.states.values()]

def replace() -> None:
    cls: Any = engine.Engine
    cls.pause = None
"""


def checked(directory: Path, engine: str = ENGINE, ours: str = OURS, version: str = "0.26.0") -> Contract:
    for package, module, text in (("vllm", "engine", engine), ("vllm_patching", "compat", ours)):
        (directory / package).mkdir(exist_ok=True)
        (directory / package / "__init__.py").touch()
        (directory / package / f"{module}.py").write_text(text)
    contract = Contract(directory, version, directory)
    contract.check()
    return contract


def test_what_fits_has_no_break_and_every_kind_of_use_is_seen(tmp_path: Path) -> None:
    contract = checked(tmp_path)
    assert contract.breaks == []
    assert {use.what for use in contract.uses} == {
        "vllm.engine",
        "vllm.engine.Engine",
        "vllm.engine.State",
        "vllm.engine.rope",
        "Engine.is_paused",
        "Engine.output",
        "Engine.pause",
        "Output.states",
        "State.name",
        "is_paused()",
        "pause(mode=, clear=)",
        "rope(_, base=)",
    }


@pytest.mark.services
@pytest.mark.parametrize(
    ("before", "after", "line", "why"),
    [
        ("def rope", "def rotary", 3, "vllm/engine.py:1: no rope"),
        ("size: int, *, base", "size: int, *, theta: float, base", 12, "vllm/engine.py:16: it needs theta"),
        ("base: float", "theta: float = 1.0", 12, "vllm/engine.py:16: it takes no base"),
        ("size: int, *, base", "*, base", 12, "vllm/engine.py:16: it takes 0 positional arguments, not 1"),
        ("clear: bool", "reset: bool", 10, "vllm/engine.py:14: it takes no clear"),
        ("def is_paused", "def paused", 11, "vllm/engine.py:10: Engine has no is_paused"),
        ("self.output =", "self.outputs =", 20, "vllm/engine.py:10: Engine has no output"),
        ("    name: str", "    title: str", 16, "vllm/engine.py:4: State has no name"),
        ("def pause", "def hold", 24, "Engine has no pause; the name is nowhere in this release"),
    ],
)
def test_a_change_in_vllm_is_named_with_both_lines(
    tmp_path: Path, before: str, after: str, line: int, why: str
) -> None:
    assert ENGINE.count(before) == 1
    breaks = [str(each) for each in checked(tmp_path, ENGINE.replace(before, after)).breaks]
    assert any(each.startswith(f"vllm_patching/compat.py:{line} uses ") and why in each for each in breaks), breaks


@pytest.mark.services
def test_a_name_that_moved_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/states.py").write_text('"""Here now."""\nclass State:\n    name: str\n')
    breaks = checked(tmp_path, ENGINE.replace("class State:", "class Other:")).breaks
    assert "vllm/engine.py:1: no State; the name is in vllm/states.py:2" in str(breaks[0])


@pytest.mark.services
def test_what_only_a_later_release_is_asked_for_is_looked_up_there(tmp_path: Path) -> None:
    assert [each.use.what for each in checked(tmp_path, version="0.30.0").breaks] == ["Engine.later"]
