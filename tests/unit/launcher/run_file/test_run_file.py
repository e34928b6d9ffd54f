"""Run files on top of others: what is merged, what an overlay changes, and what is refused."""

from datetime import date
from pathlib import Path

import pytest

from atropos_launcher.placement.addresses import argv
from atropos_launcher.plan.command_line import description
from atropos_launcher.run_file.run_file import Choice, RunFile, find_run_file, merge, read_run, validated
from atroposlib.flags import ConfigError

CPU = Choice("cpu")
BASE = """
steps: 100
bridge: broadcast
environments:
  mine: {file: mine.py, group_size: 8, dataset: hub}
trainer: {lr: 1.0e-6, batch_size: 8}
by_device: {gpu: {model: large}}
by_bridge:
  lora: {trainer: {lr: 1.0e-4}}
  restart: {bridge: {restart_interval: 10}}
by_dataset:
  small: {steps: 20, environments: {mine: {dataset: small}}}
"""
ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def run(folder: Path, text: str, choice: Choice = CPU) -> RunFile:
    (folder / "run.yaml").write_text(text)
    return validated(read_run(folder / "run.yaml", choice), "run.yaml")


def test_a_file_is_merged_over_its_base_key_by_key(folder: Path) -> None:
    found = run(folder, "base: base.yaml\ntrainer: {lr: 2.0e-5}\nenvironments: {mine: {group_size: 4}}")
    assert found.trainer == {"lr": 2e-5, "batch_size": 8}
    assert found.environments["mine"].own == {"group_size": 4, "dataset": "hub"}
    assert found.steps == 100


def test_an_overlay_belongs_to_its_file_and_what_is_on_top_beats_it(folder: Path) -> None:
    assert run(folder, "base: base.yaml\nbridge: lora").trainer["lr"] == 1e-4
    assert run(folder, "base: base.yaml\nbridge: lora\ntrainer: {lr: 3.0e-4}").trainer["lr"] == 3e-4


def test_a_flag_chooses_the_overlay_too(folder: Path) -> None:
    assert run(folder, "base: base.yaml", Choice("cpu", bridge="lora")).trainer["lr"] == 1e-4
    assert run(folder, "base: base.yaml", Choice("gpu")).model == "large"
    small = run(folder, "base: base.yaml", Choice("cpu", dataset="small"))
    assert (small.steps, small.environments["mine"].own["dataset"]) == (20, "small")


def test_settings_of_a_bridge_that_is_replaced_are_gone(folder: Path) -> None:
    text = "base: base.yaml\nbridge: {kind: broadcast, bucket_mb: 8}"
    assert run(folder, text).bridge == {"kind": "broadcast", "bucket_mb": 8}
    assert run(folder, text, Choice("cpu", bridge="restart")).bridge == {"kind": "restart", "restart_interval": 10}


def test_an_overlay_may_have_a_base_of_its_own(folder: Path) -> None:
    (folder / "other.yaml").write_text("steps: 7\ntrainer: {lr: 0.5}\nby_bridge: {lora: {trainer: {lr: 0.25}}}")
    text = "base: base.yaml\nbridge: lora\nby_dataset: {tiny: {base: other.yaml, trainer: {batch_size: 2}}}"
    found = run(folder, text, Choice("cpu", dataset="tiny"))
    assert (found.steps, found.trainer) == (7, {"lr": 0.25, "batch_size": 2})


def test_a_dataset_without_overlay_is_the_environments(folder: Path) -> None:
    text = "environments: {mine: {file: mine.py}}"
    assert run(folder, text, Choice("cpu", dataset="any")).environments["mine"].own == {"dataset": "any"}


def test_another_file_keeps_the_fields_below_apart() -> None:
    below = {"environments": {"mine": {"file": "a.py", "group_size": 8, "from_hub": False, "openai": {"timeout": 3}}}}
    merged = merge(below, {"environments": {"mine": {"file": "b.py", "words": 2}}})
    assert merged["environments"]["mine"] == {"file": "b.py", "words": 2, "inherited": {"group_size": 8}}
    again = merge(merged, {"environments": {"mine": {"file": "c.py"}}})
    assert again["environments"]["mine"] == {"file": "c.py", "inherited": {"group_size": 8, "words": 2}}


def test_an_environment_of_null_is_taken_out(folder: Path) -> None:
    found = run(folder, "base: base.yaml\nenvironments: {mine: null, other: {file: other.py}}")
    assert list(found.environments) == ["other"]


@pytest.mark.parametrize("section", ["bridge", "environments"])
def test_an_empty_section_changes_nothing(folder: Path, section: str) -> None:
    assert run(folder, f"base: base.yaml\n{section}:") == run(folder, "base: base.yaml")


def test_an_environments_file_is_found_beside_the_run_file(folder: Path) -> None:
    (folder / "mine.py").touch()
    assert run(folder, "base: base.yaml").environments["mine"].file == str(folder / "mine.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: base.yaml\nstepz: 3", "run.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        ("base: base.yaml\nsteps: 0", "run.yaml: steps: Input should be greater than or equal to 1 (got 0)"),
        ("base: base.yaml\nbridge: lorra", "bridge 'lorra' is not one of "),
        ("base: ~nobody_here/a.yaml", "no run file '~nobody_here/a.yaml'"),
        ("base: zzz.yaml", "no run file 'zzz.yaml'; recipes: agent, arithmetic, "),
        ("base: gsm9k", "no run file 'gsm9k'; did you mean 'gsm8k'?"),
        ("base: run.yaml", "is its own base"),
        ("name: my run\nbase: base.yaml", "run.yaml: name: a run's name has letters, digits, "),
        ("steps: 3", "a run needs an environment: "),
        ("environments: {mine: {group_size: 3}}", "environments.mine.file is required"),
        ("- 1", "expected keys and values, found list"),
        ("a: [", "is not YAML: "),
        (f"#{' ' * 2**22}", "it has more than 4,194,304 bytes, which no configuration has"),
        (f"a: {'[' * 900}{']' * 900}", "is not YAML: more than 64 levels of nesting"),
        (f"a: {'{a: ' * 300}1{'}' * 300}", "is not YAML: more than 64 levels of nesting"),
        ("trainer: &mine {lr: *mine}", "is not YAML: an alias stands within what it names"),
        ("by_device: {cpu: &mine {by_device: {cpu: *mine}}}", "is not YAML: an alias stands within what it names"),
        (ALIASES, "is not YAML: more than 100000 values, with those of aliases"),
        (f"steps: {'9' * 5000}", "is not YAML: a value that cannot be read as int in"),
        ("name: 2001-99-99", "is not YAML: a value that cannot be read as timestamp"),
        ("name: !!timestamp now", "is not YAML: a value that cannot be read as timestamp"),
        ("wandb: !!bool maybe", "is not YAML: a value that cannot be read as bool"),
        ("steps: !!int ''", "is not YAML: a value that cannot be read as int"),
        (f"steps: 0x{'f' * 500}", "is not YAML: a value that cannot be read as int"),
        ('system: "half \\ud83d"', "is not YAML: a value that cannot be read as str"),
        ("base: base.yaml\nbridge: [lora]", "run.yaml: bridge: expected keys and values, found list"),
        ("base: base.yaml\nenvironments: mine.py", "run.yaml: environments: expected keys and values, found str"),
        ("environments: {mine: mine.py}", "run.yaml: environments.mine: expected keys and values, found str"),
        (
            "base: base.yaml\nvllm: many",
            "vllm: expected keys and values of one server, or a list of servers, got 'many'",
        ),
        ("base: base.yaml\ntrainer: 5", "run.yaml: trainer: expected keys and values, found int"),
        ("base: base.yaml\nby_device: {cpu: {layout: auto}}", "run.yaml: layout: expected keys and values, found str"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(folder, text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_dataset_is_refused_where_a_recipe_knows_its_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset expects small, got 'large'; local files go to --dataset-path"):
        run(folder, "base: base.yaml", Choice("cpu", dataset="large"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "'mine' is a run: `atropos train --resume mine` continues it, and runs/mine/run.yaml is its"),
        ("runs/mine", "'runs/mine' is a run: `atropos train --resume mine` continues it"),
        ("my_server.py", "'my_server.py' is no run file: `atropos train arithmetic --env.file my_server.py` trains"),
        ("notes.txt", "'notes.txt' is no run file: the name of one ends in .yaml"),
    ],
)
def test_what_is_no_run_file_is_told_from_a_name_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for file in ("runs/mine/run.yaml", "my_server.py", "notes.txt"):
        (tmp_path / file).touch()
    with pytest.raises(ConfigError) as raised:
        find_run_file(name)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: base.yaml\ntrainer: {lr: 1.0e-6}\nsteps: 3\ntrainer: {kl_coef: 0.1}", "trainer stands twice"),
        ("base: base.yaml\ntrainer: {lr: 1.0e-6, lr: 2.0e-6}", "lr stands twice in one mapping"),
        (
            "base: base.yaml\nby_device: {gpus: {steps: 3}}",
            "by_device: gpus is not one of cpu, gpu; did you mean",
        ),
        ("base: base.yaml\nby_bridge: {lorra: {steps: 3}}", "by_bridge: lorra is not one of .*; did you mean 'lora'"),
    ],
)
def test_nothing_of_a_file_is_silently_left_out(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, text)


def test_a_key_may_take_the_place_of_one_that_is_merged_into_its_mapping(folder: Path) -> None:
    """Also where the mapping itself is merged into another before it is read."""
    text = "trainer: &mine {<<: {lr: 1.0e-6, kl_coef: 0.1}, lr: 2.0e-6}\napi: {<<: *mine}\nbase: base.yaml"
    found = run(folder, text)
    assert (found.trainer, found.api) == (
        {"lr": 2e-6, "kl_coef": 0.1, "batch_size": 8},
        {"lr": 2e-6, "kl_coef": 0.1},
    )


def test_a_file_that_is_no_text_is_one_line(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read .*run\.yaml: .*; give a text file in UTF-8"):
        description(folder / "run.yaml")


def test_a_date_among_the_flags_of_vllm_is_text() -> None:
    assert argv({"a": {"since": date(2024, 1, 1)}}) == ("--a", '{"since": "2024-01-01"}')
