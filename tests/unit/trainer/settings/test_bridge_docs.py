"""The table of modes in docs/bridges.md is that of example_trainer/settings/bridges.py, and its YAML resolves."""

import re
from pathlib import Path

from atroposlib.config import resolve_config
from example_trainer.settings.bridges import MODES, Adapter, Mode
from example_trainer.settings.config import TrainerConfig

PAGE = (Path(__file__).parents[4] / "docs/bridges.md").read_text()
SECTION = PAGE.split("## Configuration\n")[1].split("\n## ")[0]


def keys(mode: type[Mode]) -> set[str]:
    """What the mode has to set; switches that tell modes apart on the command line are not keys."""
    return {name for name, field in mode.model_fields.items() if name != "kind" and not field.exclude}


def test_every_mode_is_listed_with_its_keys() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.*) \|$", SECTION, re.MULTILINE)
    assert {kind: typed for kind, typed, _ in rows} == {
        kind: f"--weight-bridge-mode {mode.typed}" for kind, mode in MODES.items()
    }
    for kind, _, listed in rows:
        named = set(re.findall(r"`(\w+)`", listed))
        if "restart" in named:  # "those of `restart`"
            named = named - {"restart"} | keys(MODES["restart"])
        assert named == keys(MODES[kind]), kind


def test_the_example_resolves_and_so_do_both_spellings_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SECTION.split("```yaml\n")[1].split("```")[0])
    from_yaml, _ = resolve_config(TrainerConfig, ["--config", str(tmp_path / "run.yaml")], prog="grpo", env={})
    one, other = (spelled.split() for spelled in re.findall(r"`(--[\w-]+[\w.]* [^`]*8)`", SECTION))
    for flags in (one, other):
        typed, _ = resolve_config(TrainerConfig, ["--model-name", from_yaml.model_name, *flags], prog="grpo", env={})
        assert typed == from_yaml
    assert from_yaml.bridge.kind == "broadcast"


def test_adapters_share_their_keys() -> None:
    assert keys(Adapter) <= keys(MODES["lora"]) & keys(MODES["lora_restart"])
