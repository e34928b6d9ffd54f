"""Every command of docs/environments.md and docs/write_an_environment.md is run, with ports, directories and models of
this test.
"""

import asyncio
import inspect
import json
import os
import re
import shlex
import sys
import textwrap
import time
import tomllib
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from atropos_launcher.commands import new_environment
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.commands.cli import build, load_tree
from atroposlib.envs.commands.process import process
from atroposlib.envs.errors import Unscored
from atroposlib.envs.judge import Judge, JudgeConfig
from atroposlib.envs.question_env import QuestionEnv, Rollout, reward
from atroposlib.envs.reward_fns import registry
from atroposlib.grading import last_number
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from environments.template_server import LargerNumberConfig, LargerNumberEnv
from environments.tool_template_server import ProductEnv
from tests.client import http
from tests.serving import free_port
from tests.unit.compat.test_generation import group
from tests.unit.environments.support import env_class, running_env, sampled_texts
from tests.unit.envs.fakes import renumbered_tokenizer, running_api
from tests.waiting import until

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/environments.md").read_text()
GUIDE = (ROOT / "docs/write_an_environment.md").read_text()
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def commands(page: str) -> list[str]:
    """What a page tells people to type: in blocks, and in the text."""
    blocks = [
        line
        for kind, block in BLOCK.findall(page)
        if kind == "bash"
        for line in block.replace("\\\n", " ").splitlines()
    ]
    texts = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", BLOCK.sub("", page))]
    return list(dict.fromkeys(blocks + [text for text in texts if text.split()[0] in {"python", *SCRIPTS}]))


def code(page: str) -> str:
    """The page's program, its first one."""
    return next(str(block) for kind, block in BLOCK.findall(page) if kind == "python")


COMMANDS = commands(PAGE) + commands(GUIDE)
SAMPLING = [command for command in COMMANDS if re.match(r"python \S+\.py( serve|$)", command)]
ONCE = [command for command in COMMANDS if re.match(r"python \S+\.py (process|evaluate)", command)]
NEW = [command for command in COMMANDS if command.startswith("atropos env new ")]
TESTED = [command for command in COMMANDS if command.startswith("python -m pytest ")]
GENERATORS = [command for command in COMMANDS if command.endswith("-gen FILE")]
WATCHERS = [command for command in COMMANDS if command.startswith("inference-node")]
PAGES = [command for command in COMMANDS if "jsonl2html" in command]
LAUNCHED = [command for command in COMMANDS if command.startswith("atropos train ")]
# What NEW writes, and of which template it is a copy.
WRITTEN = {"larger_number_server": "template_server", "guess_server": "two_turn_template_server"}
WRITTEN |= {"product_server": "tool_template_server"}
EVALUATED = [command for command in COMMANDS if command.startswith("atropos evaluate ")]
# Where a service answers.
SERVICES = {
    command: health
    for name, health in {
        "fake_inference_server": "/health",
        "run_api": "/health",
        "proxy": "/health",
        "view-run": "/",
    }.items()
    for command in COMMANDS
    if name in command
}
# What needs an MCP server of the reader's: tests/unit/envs/foreign/test_mcp_tools.py has one.
WITH_MCP_SERVER = [command for command in COMMANDS if "--env.mcp_" in command]


def test_every_command_is_tried_below() -> None:
    assert sorted(COMMANDS) == sorted(
        [
            *SAMPLING,
            *ONCE,
            *NEW,
            *TESTED,
            *GENERATORS,
            *WATCHERS,
            *PAGES,
            *LAUNCHED,
            *EVALUATED,
            *SERVICES,
            *WITH_MCP_SERVER,
        ]
    )


def python_arguments(command: str) -> list[str]:
    """`command` as arguments of this Python; a program of pyproject.toml is called as its script would."""
    program, *rest = shlex.split(command)
    if program == "python":
        return [str(ROOT / word) if word.startswith("environments/") else word for word in rest]
    module, function = SCRIPTS[program].split(":")
    return ["-c", f"import sys; from {module} import {function}; sys.argv[0] = {program!r}; {function}()", *rest]


async def started(*arguments: str, cwd: Path) -> asyncio.subprocess.Process:
    pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=cwd, env=env, stdout=pipe, stderr=out)


async def run(*arguments: str, cwd: Path, code: int = 0) -> str:
    """What a command prints; it must end with `code`."""
    child = await started(*arguments, cwd=cwd)
    printed, _ = await asyncio.wait_for(child.communicate(), 90)
    assert child.returncode == code, printed.decode()
    return printed.decode()


def write_environments(folder: Path) -> None:
    """What the guide's commands write."""
    for command in NEW:
        new_environment.main([*shlex.split(command)[3:], "--dir", str(folder)])


@pytest.mark.parametrize("command", SAMPLING)
async def test_environment_served_by_a_command_samples_a_group(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *arguments = shlex.split(command)[1:]
    env_cls = env_class(WRITTEN.get(Path(script).stem, Path(script).stem))
    async with FakeInferenceServer(
        lambda prompt: [r"<answer>1</answer> \boxed{1}", r"<answer>2</answer> \boxed{2}"]
    ) as server:
        fields = {"tokenizer_name": save_tiny_tokenizer(tmp_path / "tokenizer"), "total_steps": 1, "heldout_size": 2}
        fields |= {"data_path_to_save_groups": tmp_path / "groups.jsonl", "ensure_scores_are_not_same": False}
        if "HuggingFaceH4" in command or (env_cls.name == "gsm8k" and "arithmetic" not in command):  # no hub here
            records = [{"question": f"{n}+1?", "problem": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(8)]
            (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
            fields |= {"dataset_path": tmp_path / "problems.jsonl"}
        flags = [f"--env.{name}={value}" for name, value in fields.items()]
        flags += [f"--openai.base_url={server.base_url}", "--openai.model_name=fake"]
        await process(build(env_cls, load_tree(env_cls, "serve", [*arguments[1:], *flags], script)))
    assert (tmp_path / "groups.jsonl").read_text().count("\n") == 1


async def test_environment_without_arguments_serves(tmp_path: Path) -> None:
    printed = await run(*python_arguments(SAMPLING[0]), "--env.rollout_server_url", "none", "--dry-run", cwd=tmp_path)
    assert SAMPLING[0] == "python environments/gsm8k_server.py"
    assert "rollout_server_url: none" in printed


@pytest.mark.rotating
@pytest.mark.parametrize("command", ONCE)
async def test_command_that_ends_does_what_the_page_says(tmp_path: Path, command: str) -> None:
    write_environments(tmp_path)
    (tmp_path / "colours.py").write_text(code(PAGE))
    (tmp_path / "my_env.py").write_text(snippet("DatasetConfig", "cli"))
    (tmp_path / "my.csv").write_text("prompt,result\n" + "".join(f"50 + {n}?,{50 + n}\n" for n in range(80)))
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    arguments = python_arguments(command)
    async with FakeInferenceServer(
        lambda prompt: ["It is 50, and blue.", "No idea."], tokenizer_folder=tokenizer
    ) as server:
        await run(*arguments, "--openai.base_url", server.base_url, cwd=tmp_path)
    if "--samples" in command:
        (samples,) = (tmp_path / "evaluations").glob("*.jsonl")
        name = "product" if "product_server" in command else "gsm8k"
        assert (samples.name, samples.read_text().count("\n")) == (f"{name}-my-model.jsonl", 1 + 4 * 64)
        return
    if "evaluate" in command:
        assert "accuracy" in json.loads((tmp_path / "results/metrics.json").read_text())["results"]["all"]
        return
    count = int(arguments[arguments.index("--env.total_steps") + 1])
    (groups,) = (tmp_path / "data").glob("*.jsonl")
    assert groups.read_text().count("\n") == count == groups.with_suffix(".html").read_text().count("Group ")


@pytest.mark.rotating
@pytest.mark.parametrize("named_by", ["nobody", "server", "environment"])
async def test_the_guide_tries_its_environment_as_typed_and_reads_the_servers_answers(
    named_by: str, tmp_path: Path
) -> None:
    """From an empty directory. Server and environment have one tokenizer, whichever of the two names it."""
    new, pytest_, serve, process = (
        next(command for command in commands(GUIDE) if word in command)
        for word in ("env new", "-m pytest", "fake_inference_server", "larger_number_server.py process ")
    )
    await run(*python_arguments(new), cwd=tmp_path)
    if named_by == "nobody":
        assert "3 passed" in await run(*python_arguments(pytest_), cwd=tmp_path)
    port = str(free_port())
    tokenizer = renumbered_tokenizer(tmp_path / "tokenizer")
    of_server = ["--tokenizer", tokenizer] if named_by == "server" else []
    of_environment = ["--env.tokenizer_name", tokenizer] if named_by == "environment" else []
    child = await started(*python_arguments(serve), "--port", port, *of_server, cwd=tmp_path)
    try:
        async with aiohttp.ClientSession() as session:
            await answers(session, f"http://127.0.0.1:{port}/health", child)
        url = ["--openai.base_url", f"http://127.0.0.1:{port}/v1"]
        await run(*python_arguments(process), *url, *of_environment, cwd=tmp_path)
    finally:
        child.terminate()
        await asyncio.wait_for(child.communicate(), 30)
    groups = [json.loads(line) for line in (tmp_path / "data/larger_number.jsonl").read_text().splitlines()]
    assert [sorted(group["scores"]) for group in groups] == [[0.0, 0.0, 1.0, 1.0]] * 2
    page = (tmp_path / "data/larger_number.html").read_text()
    assert (page.count("score 1<"), page.count("score 0<")) == (4, 4)
    assert all(page.count(f"{answer}<") == 2 for answer in ("It is 0.", "No idea."))


@pytest.mark.parametrize("command", PAGES)
async def test_command_of_the_page_makes_a_page_of_groups(tmp_path: Path, command: str) -> None:
    record = {"messages": [[{"role": "user", "content": "Red or blue?"}]], "scores": [1.0]}
    (tmp_path / "FILE.jsonl").write_text(json.dumps(record) + "\n")
    await run(*python_arguments(command), cwd=tmp_path)
    assert "Red or blue?" in (tmp_path / "FILE.html").read_text()


async def test_environment_of_the_page_scores_and_evaluates(tmp_path: Path) -> None:
    (tmp_path / "colours.py").write_text(code(PAGE))
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    async with FakeInferenceServer(lambda prompt: ["It is blue.", "No idea."]) as server:
        flags = ["--env.tokenizer_name", tokenizer, "--openai.base_url", server.base_url]
        await run("colours.py", "process", "--env.total_steps", "2", *flags, cwd=tmp_path)
        assert "  accuracy     1\n" in await run("colours.py", "evaluate", *flags, cwd=tmp_path)
    assert (tmp_path / "data/colours.html").read_text().count("score 1<") == 4


@pytest.mark.parametrize("command", LAUNCHED)
async def test_a_run_would_start_with_that_environment(command: str, tmp_path: Path) -> None:
    write_environments(tmp_path)
    shown = await run(*python_arguments(command), "--dry-run", cwd=tmp_path)
    assert f"file: {tmp_path / command.split('--env.file ')[1].split()[0]}" in shown


@pytest.mark.parametrize("command", EVALUATED)
async def test_a_recipe_is_evaluated_on_a_server_that_runs_already(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    async with FakeInferenceServer(lambda prompt: "It is 50.", api_key="secret") as server:
        typed = command.replace("http://localhost:9001/v1", server.base_url)
        shown = await run(*python_arguments(typed), "--env.heldout_size", "2", cwd=tmp_path)
    assert "  questions, samples, failed  2 8 0\n" in shown


@pytest.mark.parametrize("command", SERVICES)
async def test_service_of_the_page_answers(tmp_path: Path, command: str) -> None:
    port = free_port()
    arguments = python_arguments(re.sub(r" --port \d+", "", command))
    model = {"model_name": "m", "tokenizer_name": str(save_tiny_tokenizer(tmp_path / "tokenizer"))}
    server = {"base_url": "http://127.0.0.1:1/v1", "server_type": "vllm", "health_check": False}
    (tmp_path / "servers.json").write_text(json.dumps(model | {"servers": [server]}))
    child = await started(*arguments, "--port", str(port), cwd=tmp_path)
    try:
        async with aiohttp.ClientSession() as session:
            await answers(session, f"http://127.0.0.1:{port}{SERVICES[command]}", child)
    finally:
        if child.returncode is None:
            child.terminate()
        await asyncio.wait_for(child.communicate(), 30)


async def answers(session: aiohttp.ClientSession, url: str, child: asyncio.subprocess.Process) -> None:
    """Return when `url` replies 200; `child` must live until then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert child.returncode is None, (await child.communicate())[0].decode()
        try:
            async with session.get(url) as reply:
                assert reply.status == 200
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise AssertionError(f"{url} gave no reply within 60 s")


@pytest.mark.parametrize("command", GENERATORS)
async def test_generator_of_the_page_keeps_records(tmp_path: Path, command: str) -> None:
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    async with running_api() as api:
        flags = ["--api-url", api.url, "--tokenizer", tokenizer, "--num-seqs-to-save", "1", "--tasks-per-step", "1"]
        keeping = asyncio.create_task(run(*python_arguments(command), *flags, cwd=tmp_path))
        async with aiohttp.ClientSession() as session:

            async def registered() -> bool:
                size: int = (await (await session.get(f"{api.url}/info")).json())["batch_size"]
                return size >= 0

            await until(registered)
        for _ in range(8):
            await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(0.0, 1.0))
        await keeping
    assert json.loads((tmp_path / "FILE").read_text().splitlines()[0])


@pytest.mark.parametrize("command", WATCHERS)
async def test_watcher_of_the_page_waits_for_the_trainer(tmp_path: Path, command: str) -> None:
    async with running_api() as api:
        arguments = python_arguments(command.replace("http://localhost:8000", api.url))
        said = await run(*arguments, "--startup-timeout", "0.1", cwd=tmp_path, code=1)
    assert "no trainer has named one" in said
    assert "--wandb-project" in said


def test_code_of_the_guide_is_what_its_commands_write_and_short(tmp_path: Path) -> None:
    write_environments(tmp_path)
    for (written, name), lines in zip(WRITTEN.items(), (60, 90, 60), strict=True):
        text = (ROOT / f"environments/{name}.py").read_text()
        assert text == (tmp_path / f"{written}.py").read_text()
        assert len(text.splitlines()) < lines
    shown = re.findall(r"<!-- (part of )?environments/(\w+)\.py -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
    assert {name for _, name, _ in shown} == {*WRITTEN.values()}
    for part, name, block in shown:
        text = (ROOT / f"environments/{name}.py").read_text()
        assert block in text or textwrap.indent(block, "    ") in text, block
        assert part or block == text


def test_the_settings_of_the_page_are_those_of_every_environment_with_their_defaults() -> None:
    section = PAGE.split("## Settings\n")[1].split("\n## ")[0].split("**Of a `QuestionEnv`**")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    fields = BaseEnvConfig.model_fields
    assert sorted(listed) == sorted(fields)
    for name, shown in listed.items():
        default = fields[name].default
        words = "unset" if default is None else default.name if isinstance(default, Enum) else str(default)
        if name != "tokenizer_name":  # "a hub name"
            assert shown.strip("`") == (words.lower() if isinstance(default, bool) else words), name


def snippet(*words: str) -> str:
    """The guide's code in which `words` occur."""
    return next(
        str(text) for kind, text in BLOCK.findall(GUIDE) if kind == "python" and all(word in text for word in words)
    )


def defined_by(*words: str) -> dict[str, Any]:
    """What such code defines."""
    given: dict[str, Any] = {"json": json, "Rollout": Rollout, "last_number": last_number, "registry": registry}
    given |= {each.__name__: each for each in (Judge, JudgeConfig, LargerNumberConfig, LargerNumberEnv, reward)}
    names = dict(given)
    exec(compile(snippet(*words), "docs/write_an_environment.md", "exec"), names)
    return {name: value for name, value in names.items() if name not in given}


def env_of(*words: str, of: type[QuestionEnv] = LargerNumberEnv, **members: Any) -> type[Any]:
    """The template `of` with the methods of the guide's snippet in which `words` occur."""
    methods = {name: value for name, value in defined_by(*words).items() if inspect.isfunction(value)}
    assert methods
    return type("SnippetEnv", (of,), methods | members)


async def test_the_shop_of_the_guide_keeps_what_was_bought_in_each_conversation(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "buy", "arguments": {"product": "tea", "count": 2}}</tool_call>'
    async with (
        FakeInferenceServer(lambda prompt: "Done." if "products in" in prompt else call) as server,
        running_env(env_of("basket", of=ProductEnv), tmp_path, server, max_new_tokens=128) as env,
    ):
        group, _ = await env.collect_trajectories([1, 9])
    assert group is not None
    assert group["scores"] == [1.0] * 4
    assert sampled_texts(group) == [f"{call}<|im_end|>Done.<|im_end|>"] * 4


@pytest.mark.parametrize(
    ("verdict", "scores"), [("<score>8</score>", [0.8]), ("<score>0</score>", [0.0]), ("No", None)]
)
async def test_the_judge_of_the_guide_scores_and_what_it_does_not_answer_has_no_score(
    verdict: str, scores: list[float] | None, tmp_path: Path
) -> None:
    judged = defined_by("JudgeConfig", "Judge(")["JudgedEnv"]
    async with (
        FakeInferenceServer(lambda prompt: "It is 9.") as server,
        FakeInferenceServer(lambda _: verdict) as judge,
        running_env(judged, tmp_path, server, judge={"base_url": judge.base_url, "model": "fake"}) as env,
    ):
        if scores is None:
            with pytest.raises(Unscored):
                await env.collect_trajectories([1, 9])
        else:
            group, _ = await env.collect_trajectories([1, 9])
            assert group["scores"] == scores * 4
    (prompt,) = judge.requests[0][1]["messages"]
    assert "why 9 is the larger number?\n\nIt is 9.\n\nEnd with" in prompt["content"]


async def test_the_score_of_the_guide_gets_the_conversation_and_the_state(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: ["It is 9.", "1"]) as server,
        running_env(env_of("messages, state"), tmp_path, server) as env,
    ):
        group, _ = await env.collect_trajectories([1, 9])
    assert group is not None
    assert group["scores"] == [1.0, 0.0] * 2


async def test_the_rewards_of_the_guide_are_added_up(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: ["It is 9.", "1, please", "9", "1"]) as server,
        running_env(env_of("@reward", score=QuestionEnv.score), tmp_path, server) as env,
    ):
        group, _ = await env.collect_trajectories([1, 9])
    assert group is not None
    assert group["scores"] == pytest.approx([1 + 0.1 * (1 - 3 / 40), 0.1 * (1 - 2 / 40), 1 + 0.1 * 0.975, 0.1 * 0.975])
    assert group["rewards"] is not None
    assert [each["polite"] for each in group["rewards"]] == [0, 1, 0, 0]
