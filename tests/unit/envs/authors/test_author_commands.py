"""What an author types at an environment's commands, and where they write: one line says what is wrong."""

import os
from pathlib import Path

import pytest

from tests.unit.envs.authors.desk import (
    GROUPS,
    PROCESS,
    QUESTION,
    SCORE_DEF,
    SCORE_RETURN,
    Desk,
    changed,
)

WRONG_INPUT = {
    "flag": (["--env.grup_size", "2"], "unknown flag --env.grup_size; did you mean 'env.group_size'?"),
    "no prefix": (["--group_size", "2"], "unknown flag --group_size; did you mean 'env.group_size'?"),
    "value out of range": (["--env.group_size", "0"], "env.group_size: Input should be greater than or equal to 1"),
    "type": (["--env.group_size", "two"], "(got 'two')"),
    "key of YAML": (["--config", "typo.yaml"], "unknown key 'env.grup_size'; did you mean 'env.group_size'?"),
    "level of YAML": (["--config", "level.yaml"], "the key 'group_size' belongs under env: in the --config file"),
}


@pytest.mark.parametrize("name", WRONG_INPUT)
def test_wrong_input_is_one_line_that_says_what_was_meant(desk: Desk, name: str) -> None:
    Path("typo.yaml").write_text("env: {grup_size: 2}\n")
    Path("level.yaml").write_text("group_size: 2\n")
    flags, said = WRONG_INPUT[name]
    ended = desk.run(QUESTION, "process", *flags)
    assert ended.code == 2
    assert said in ended.text
    assert ended.text.count("\n") == 1


def test_a_tokenizer_that_is_not_there_is_one_line(desk: Desk) -> None:
    ended = desk.run(QUESTION, *PROCESS, "--env.tokenizer_name", "./nowhere")
    assert ended.code == 1
    assert "no tokenizer for './nowhere'" in ended.last_line
    assert "set tokenizer_name" in ended.last_line


@pytest.mark.parametrize(
    ("command", "kind"),
    [(PROCESS, "vllm"), (("evaluate", "--openai.model_name", "fake"), "openai")],
)
def test_a_wrong_address_of_a_server_that_answers_is_not_waited_for(
    desk: Desk, command: tuple[str, ...], kind: str
) -> None:
    ended = desk.run(QUESTION, *command, "--openai.server_type", kind, url=desk.url.removesuffix("/v1"))
    assert ended.code == 1
    assert f"did you forget /v1? Try --openai.base_url {desk.url}" in ended.last_line
    assert "Traceback" not in ended.text


def test_held_out_questions_in_an_array_are_evaluated(desk: Desk) -> None:
    array = "import numpy; self.held_out = numpy.array(['a', 'b'], object)"
    source = changed(QUESTION, ('self.held_out = ["a", "b"]', array))
    assert desk.run(source, "evaluate", "--openai.server_type", "vllm").code == 0


def test_a_server_without_token_ids_is_one_line_that_names_the_flag(desk: Desk) -> None:
    ended = desk.run(GROUPS, *PROCESS, "--openai.server_type", "openai")
    assert ended.code == 2
    assert f"{desk.url} returns no token ids" in ended.last_line
    assert "--openai.server_type vllm" in ended.last_line
    assert "Traceback" not in ended.text


def test_an_evaluation_of_no_questions_asks_for_them(desk: Desk) -> None:
    source = changed(QUESTION, ("setup(self):", "setup(self):  # here"), ('self.held_out = ["a", "b"]', "pass"))
    assert "held_out is empty; set it in `setup`" in desk.run(source, "evaluate", "--openai.server_type", "vllm").text


def test_a_file_of_groups_that_is_named_as_a_page_is_not_replaced_by_it(desk: Desk) -> None:
    assert desk.run(QUESTION, *PROCESS, "--env.data_path_to_save_groups", "groups.html").code == 0
    assert Path("groups.html").read_text().startswith("{")
    assert Path("groups.page.html").read_text().startswith("<!doctype html>")


def test_a_place_where_nothing_can_be_written_is_told_before_anything_is_sampled(desk: Desk) -> None:
    Path("file").touch()
    Path("data/mine.html").mkdir(parents=True)
    for flags, said in (
        ([], "the page of the groups, data/mine.html: it is a directory, not a regular file"),
        (["--env.data_path_to_save_groups", "file/a.jsonl"], "cannot write groups to file/a.jsonl: "),
        (["--env.metrics_path", "file/a.jsonl"], "cannot write metrics to file/a.jsonl: "),
    ):
        ended = desk.run(QUESTION, *PROCESS, *flags)
        assert ended.code in (1, 2)
        assert said in ended.last_line
        assert "choose another" in ended.last_line
        assert "Traceback" not in ended.text
        assert "Group 1 of" not in ended.text


def test_a_page_that_cannot_be_written_at_the_end_is_one_line(desk: Desk) -> None:
    breaks = "__import__('os').makedirs('data/mine.html', exist_ok=True); return float(len(answer))"
    ended = desk.run(changed(QUESTION, (SCORE_RETURN, breaks)), *PROCESS)
    assert ended.code == 1
    assert "The groups are in data/mine.jsonl, but their page is not in data/mine.html: it is a" in ended.last_line
    assert "Traceback" not in ended.text


def test_a_configuration_from_a_pipe_counts(desk: Desk) -> None:
    read, write = os.pipe()
    os.write(write, b"env: {total_steps: 1, wandb_name: piped}\n")
    os.close(write)
    ended = desk.run(QUESTION, "process", "--config", f"/dev/fd/{read}")
    os.close(read)
    assert ended.code == 0
    assert "Group 1 of 1 is done" in ended.text


def test_a_home_directory_that_the_shell_left_is_one(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(desk.program.parent / "home"))
    assert desk.run(QUESTION, *PROCESS, "--env.data_path_to_save_groups=~/groups.jsonl").code == 0
    assert Path("home/groups.html").is_file()
    assert not Path("~").exists()


def test_a_second_process_says_where_it_writes(desk: Desk) -> None:
    first, second = desk.run(QUESTION, *PROCESS), desk.run(QUESTION, *PROCESS)
    assert first.last_line.endswith("Wrote the groups to data/mine.jsonl and the page to data/mine.html")
    assert "Writing groups to data/mine_1.jsonl, as there is a data/mine.jsonl already" in second.text
    assert "the page to read will be data/mine_1.html" in second.text
    assert second.last_line.endswith("Wrote the groups to data/mine_1.jsonl and the page to data/mine_1.html")
    assert Path("data/mine_1.jsonl").read_text().count("\n") == 2


def test_rollouts_that_fail_say_why_themselves(desk: Desk) -> None:
    fails = "raise RolloutFailed('the game server is gone')"
    ended = desk.run(
        changed(
            QUESTION,
            (SCORE_DEF, f"async def rollouts(self, item, n, *settings):\n        {fails}\n\n    {SCORE_DEF}"),
            ("\n\nclass", "\nfrom atroposlib.envs.failures import RolloutFailed\n\nclass"),
        ),
        *PROCESS,
    )
    assert ended.code == 1
    assert "The last one: 4 of its 4 rollouts failed" in ended.last_line
    assert ended.last_line.endswith("the game server is gone")
