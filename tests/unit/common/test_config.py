import re
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from pydantic import AliasChoices, Field, SecretStr

from atroposlib.config import Config, check_name, config_yaml, load_config, resolve_config
from atroposlib.flags import ConfigError, Setting, keys_of, split


class Sub(Config):
    group_size: int = Field(4, ge=1)
    use_wandb: bool = True
    steps: int = 1
    limit: float | None = 0.5


class Tree(Config):
    model_name: str = Field("m", validation_alias=AliasChoices("model_name", "model"))
    master_port: int = Field(0, ge=0, le=65535, json_schema_extra={"env": "MASTER_PORT"})
    betas: tuple[float, float] = (0.9, 0.95)
    names: list[str] = Field(default_factory=list)
    shared: bool = False
    env: Sub = Sub()


def resolve(*argv: str, **layers: object) -> Tree:
    env, defaults = layers.get("env", {}), layers.get("defaults")
    return resolve_config(Tree, argv, prog="t", env=env, defaults=defaults)[0]  # type: ignore[arg-type]


def test_dashes_underscores_and_equals_are_the_same_flag() -> None:
    assert (
        resolve("--model-name", "a").model_name
        == resolve("--model_name=a").model_name
        == resolve("--model", "a").model_name
        == "a"
    )


def test_negative_value_after_a_space_is_a_value() -> None:
    assert resolve("--env.steps", "-1").env.steps == -1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--shared"], True),
        (["--shared", "false"], False),
        (["--shared=true"], True),
        (["--no-shared"], False),
        (["--shared", "--env.steps", "2"], True),
    ],
)
def test_boolean_with_or_without_value(argv: list[str], expected: bool) -> None:
    assert resolve(*argv).shared is expected


def test_nested_negated_boolean() -> None:
    assert resolve("--env.no-use-wandb").env.use_wandb is False


def test_none_is_null_and_lists_are_comma_separated() -> None:
    tree = resolve("--env.limit", "None", "--names", "a,b", "--betas", "0.8,0.9")
    assert tree.env.limit is None
    assert tree.names == ["a", "b"]
    assert tree.betas == (0.8, 0.9)


class Level(Enum):
    LOW = 1
    HIGH = 2


class Choices(Config):
    players: Literal[2, 3] = 2
    mixed: Literal["auto", True] = "auto"
    many: list[Literal[1, 2]] = Field(default_factory=list)
    level: Level = Level.LOW


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        (["--players", "3"], "players", 3),
        (["--mixed", "true"], "mixed", True),
        (["--many", "1,2"], "many", [1, 2]),
        (["--level", "2"], "level", Level.HIGH),
        (["--level", "HIGH"], "level", Level.HIGH),
    ],
)
def test_a_choice_that_is_no_text_is_given_as_help_shows_it(argv: list[str], field: str, expected: object) -> None:
    assert getattr(resolve_config(Choices, argv, prog="t", env={})[0], field) == expected
    with pytest.raises(ConfigError, match=r"players: Input should be 2 or 3 \(got '4'\)"):
        resolve_config(Choices, ["--players", "4"], prog="t", env={})


class Keys(Config):
    key: SecretStr = Field(SecretStr(""), json_schema_extra={"env": "KEY"})
    other: SecretStr | None = Field(None, json_schema_extra={"env": "OTHER"})


class Locked(Config):
    steps: int = 0
    keys: Keys = Keys()


def test_what_is_printed_of_a_configuration_does_not_hide_secrets_of_the_environment(tmp_path: Path) -> None:
    printed, variables = tmp_path / "printed.yaml", {"KEY": "k", "OTHER": "o"}
    printed.write_text(config_yaml(resolve_config(Locked, [], prog="t", env={})[0]))
    found, _ = resolve_config(Locked, ["--config", str(printed)], prog="t", env=variables)
    assert found.keys == Keys(key=SecretStr("k"), other=SecretStr("o"))


def test_flags_beat_yaml_beats_environment_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {group_size: 3, steps: 3}\nmodel: from-yaml\n")
    tree = resolve(
        "--config",
        str(file),
        "--env.steps",
        "9",
        env={"MASTER_PORT": "29500"},
        defaults={"master_port": 1, "model_name": "d", "env": {"limit": 0.25}},
    )
    assert (tree.env.group_size, tree.env.steps, tree.master_port, tree.model_name, tree.env.limit) == (
        3,
        9,
        29500,
        "from-yaml",
        0.25,
    )


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--modle-name", "x"], "did you mean 'model_name'?"),
        (["--dryrun"], "did you mean 'dry_run'?"),
        (["--env.group_size", "0"], "greater than or equal to 1 (got '0')"),
        (["--master-port", "70000"], "less than or equal to 65535"),
        (["--env.steps"], "expects a value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config", "/nonexistent.yaml"], "No such file"),
        (["--config", "/dev/zero"], "it has more than 4,194,304 bytes, which no configuration has"),
    ],
)
def test_wrong_input_names_value_and_remedy(argv: list[str], fragment: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        resolve(*argv)


@pytest.mark.parametrize(
    "text", [b"steps: 2001-99-99", b"steps: " + b"[" * 900, b"steps: !!bool maybe", b"steps: \xff", b"steps: \0"]
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "c.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"^--config .*/c\.yaml is not YAML: [^\n]*$"):
        resolve("--config", str(tmp_path / "c.yaml"))


def test_a_file_behind_an_equals_sign_may_be_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("env: {group_size: 3}\n")
    assert resolve("--config=~/c.yaml").env.group_size == 3


def test_unknown_yaml_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {groupsize: 3}\n")
    with pytest.raises(ConfigError, match=r"did you mean 'env.group_size'"):
        resolve("--config", str(file))


def test_dry_run_prints_the_tree_and_exits_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(Tree, ["--dry-run", "--env.steps", "5"], prog="t", env={})
    assert caught.value.code == 0
    assert "steps: 5" in capsys.readouterr().out


def test_wrong_input_exits_two_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(Tree, ["--nope"], prog="t", env={})
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "beginning", "end"),
    [
        (["--env.steps", 20_000 * "9 "], "t: error: env.steps: Input should", " 9 9 9 ')"),
        ([f"--{20_000 * 'n'}"], "t: error: unknown flag --nnn", "n (--help lists them)"),
        (["--env.steps", "1", 20_000 * "é"], "t: error: unexpected argument 'ééé", "é': flags start with '--'"),
    ],
)
def test_of_a_huge_value_the_line_shows_both_ends_and_all_that_is_said(
    argv: list[str], beginning: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(Tree, argv, prog="t", env={})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(beginning)
    assert line.endswith(end)
    assert len(line) < 1100


@pytest.mark.parametrize(
    ("line", "words", "flags", "settings"),
    [
        ("file --shared model --names a", ["file", "model"], ["--shared", "--names", "a"], []),
        ("--shared false m --no-shared n", ["m", "n"], ["--shared", "false", "--no-shared"], []),
        ("--env.steps -1 - -h", ["-"], ["--env.steps", "-1", "-h"], []),
        ("--names --sec.a-b 5 m", ["m"], ["--names"], [Setting("a-b", "5")]),
        (
            "--sec.2.x=--y --sec.on --sec.x -1e-5",
            [],
            [],
            [Setting("2.x", "--y", True), Setting("on"), Setting("x", "-1e-5")],
        ),
        ("--sec.no-x m --sec. 1 --section.x 1", [], ["--section.x", "1"], [Setting("no-x", "m"), Setting("", "1")]),
    ],
)
def test_a_command_line_is_taken_apart(line: str, words: list[str], flags: list[str], settings: list[Setting]) -> None:
    found = split(line.split(), keys_of(Tree), ["sec"])
    assert (found.words, found.flags, found.sections) == (words, flags, {"sec": settings})


@pytest.mark.parametrize(
    ("setting", "name", "value", "words"),
    [
        (Setting("max-len", "512"), "max_len", 512, ["--b.max-len", "512"]),
        (Setting("a", "x: y: z", True), "a", "x: y: z", ["--b.a=x: y: z"]),  # no YAML
        (Setting("a", "2001-99-99"), "a", "2001-99-99", ["--b.a", "2001-99-99"]),  # no date
        (Setting("a", "[" * 900), "a", "[" * 900, ["--b.a", "[" * 900]),
        (Setting("a", "[[0], 1]"), "a", [[0], 1], ["--b.a", "[[0], 1]"]),
        (Setting("no_x"), "no_x", True, ["--b.no_x"]),
    ],
)
def test_a_setting_is_a_value_of_the_run_or_a_flag_of_its_program(
    setting: Setting, name: str, value: object, words: list[str]
) -> None:
    assert (setting.name, setting.value, setting.words("b.")) == (name, value, words)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a" * 128, "Ω✓ 数学", "with space", "a/b:c"])
def test_a_name_is_up_to_128_printable_characters(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["a" * 129, "a\n", "\x1b[2J", "a\x9bb", "a\u202eb", "a\u2028b", "\ud800", "a\tb", "a\u200b"], ids=ascii
)
def test_other_names_are_refused_with_the_limit(name: str) -> None:
    with pytest.raises(ValueError, match="at most 128 characters"):
        check_name(name)
