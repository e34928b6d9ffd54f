"""Unchanged tasksets in verifiers' own process: trained through every service on real vLLM, with tools over several
turns, and with a harness that is killed. The latter two have a server that answers by a script instead of a model.
"""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from atroposlib.child_processes.lines import MARK
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.errors import EnvError
from atroposlib.envs.failures import Failure
from environments.verifiers_server import OWN_PYTHON, VerifiersConfig, VerifiersEnv
from example_trainer.quickstart_model import cached_model
from tests.integration.conftest import REPOSITORY
from tests.integration.launched import launch
from tests.serving import free_port
from tests.unit.environments.fake_renderers_server import FakeRenderersServer
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]

SPECIAL = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TASKSET = Path(__file__).with_name("adding_taskset.py")
HARNESS = ".cache/verifiers/runtimes/scripts/"  # where verifiers keeps the program of the null harness


@pytest.fixture(scope="session", autouse=True)
def verifiers_is_installed() -> None:
    subprocess.run([REPOSITORY / "scripts/verifiers_setup.sh"], check=True, timeout=1800, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def tool_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The quickstart model's tokenizer with the tokens that the renderer `qwen3` needs."""
    from transformers import AutoTokenizer

    model = cached_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"unk_token": "<unk>"})  # its own is <|endoftext|>, which the renderer needs known
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@contextlib.asynccontextmanager
async def playing(
    tokenizer: Any, answer: Callable[[Sequence[int]], list[int]], **fields: Any
) -> AsyncIterator[tuple[VerifiersEnv, FakeRenderersServer]]:
    """The environment over the real verifiers; the server answers by `answer`."""
    settings: dict[str, Any] = {"group_size": 2, "heldout_size": 1, "use_wandb": False, "max_new_tokens": 64}
    settings |= {"verifiers_python": str(OWN_PYTHON), "tokenizer_name": tokenizer.name_or_path, "renderer": "qwen3"}
    async with FakeRenderersServer(answer) as server:
        connection = APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")
        env = VerifiersEnv(VerifiersConfig(**settings | {"taskset": str(TASKSET)} | fields), [connection])
        async with env._env_run:
            await env.setup()
            yield env, server


def test_an_unchanged_taskset_is_trained_by_one_flag(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text((REPOSITORY / "environments/verifiers_tasksets/sums.py").read_text())
    run = tmp_path / f"verifiers-{uuid.uuid4().hex[:8]}"
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    where = ["--runs", str(tmp_path), "--run-name", run.name]
    small = ["--env.group_size", "4", "--env.steps_per_eval", "0", "--env.max_new_tokens", "24"]
    small += ["--env.max_batches_offpolicy", "0"]
    small += ["--trainer.batch_size", "4", "--trainer.seq_len", "256", "--vllm.max_model_len", "256"]
    words = ["verifiers", "--env.taskset", str(mine), "--steps", "2", *small, *ports, *where]
    done = launch("train", *words, cwd=tmp_path, timeout_s=2400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == [1, 2]
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["logprob_diff_max"] < 1e-2  # the trainer reads the tokens that were sampled
    groups = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for group in groups:
        assert group["policy_versions"], group.keys()
        assert all(first <= last <= 2 for first, last in group["policy_versions"])
        assert len({tuple(tokens[:8]) for tokens in group["tokens"]}) == 1  # one question
    shutil.rmtree(run)


async def test_a_conversation_with_a_tool_is_one_rollout_whose_turns_are_trained(tool_tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "%s", "arguments": {"a": %d, "b": 5}}\n</tool_call><|im_end|>'

    def answer(ids: Sequence[int]) -> list[int]:
        prompt = tool_tokenizer.decode(ids)
        asked = int(prompt.rpartition("Add ")[2].split()[0])
        text = f"It is {asked + 5}.<|im_end|>" if "<tool_response>" in prompt else call % (tool(prompt), asked)
        ids = tool_tokenizer.encode(text, add_special_tokens=False)
        return list(ids)

    async with playing(tool_tokenizer, answer) as (env, server):
        group, _ = await env.collect_trajectories(await env.get_next_item())
    assert isinstance(group, dict)
    assert group["scores"] == [1.0, 1.0]
    assert "failed" not in group
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        trained = tool_tokenizer.decode([mask for mask in masks if mask != -100])
        assert trained.startswith("<tool_call>")
        assert trained.endswith(".<|im_end|>")
        assert "<tool_response>" in tool_tokenizer.decode(tokens)
        assert "<tool_response>" not in trained
    assert len(server.asked) == 4
    assert group["policy_versions"] == [[3, 3]] * 2


async def test_a_killed_harness_is_a_failed_rollout_and_the_next_one_is_played(tool_tokenizer: Any) -> None:
    killed: list[int] = []

    def answer(ids: Sequence[int]) -> list[int]:
        if not killed:  # while it waits for its first answer
            found = [process.pid for process in marked(env) if HARNESS in " ".join(process.cmdline())]
            for pid in found:
                psutil.Process(pid).kill()
            killed.extend(found)
        return list(tool_tokenizer.encode("It is 7.<|im_end|>", add_special_tokens=False))

    async with playing(tool_tokenizer, answer, rollouts_at_once=1) as (env, _):
        failed = await env._judged_answer(0)
        assert killed
        assert isinstance(failed, Failure)
        assert failed.cause == "infrastructure"
        again = await env._judged_answer(0)
        assert not isinstance(again, Failure)
    assert not marked(env)


async def test_a_killed_verifiers_process_leaves_nothing_and_is_started_again(tool_tokenizer: Any) -> None:
    asked = asyncio.Event()

    def answer(ids: Sequence[int]) -> list[int]:
        asked.set()
        return list(tool_tokenizer.encode("It is 7.<|im_end|>", add_special_tokens=False))

    async with playing(tool_tokenizer, answer, rollouts_at_once=1) as (env, _):
        playing_one = asyncio.create_task(env._judged_answer(0))
        await until(lambda: any(HARNESS in " ".join(process.cmdline()) for process in marked(env)), 300)
        child = await env.process.opened()
        assert child.pid is not None
        psutil.Process(child.pid).kill()
        failed = await playing_one
        assert isinstance(failed, Failure)
        assert "killed by signal KILL" in str(failed)
        assert not marked(env)
        assert not isinstance(await env._judged_answer(0), Failure)
    assert not marked(env)


CLOCK = """
import verifiers.v1 as vf

class Clock(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def now(self) -> str:
        return "12"

class ClockTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Clock(vf.ToolsetConfig())]

class ClockTaskset(vf.Taskset[ClockTask, vf.TasksetConfig]):
    def load(self):
        yield from (ClockTask(vf.TaskData(prompt=str(n)), self.config.task) for n in range(4))

__all__ = ["ClockTaskset"]
"""
LOADS = CLOCK.replace("        yield from", "        raise LookupError('words are missing')\n        yield from")


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("def load_environment(): ...", {}, "is an environment of verifiers v0"),
        ("import no_such_package", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        (LOADS, {}, r"LookupError: words are missing \(\S+wrong.py:"),
        (CLOCK, {"renderer": "gpt-oss"}, "renderer 'gpt-oss' does not fit the tokenizer"),
        (CLOCK, {"harness": "codex", "allow_host_execution": True}, "harness 'codex' of agent 'agent' speaks the Resp"),
        (CLOCK, {}, "toolset Clock: `python -m wrong`, by which verifiers starts it, starts no server"),
    ],
)
async def test_what_cannot_play_is_one_line_in_the_setup(
    tool_tokenizer: Any, tmp_path: Path, text: str, fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(EnvError, match=said) as raised:
        async with playing(tool_tokenizer, lambda ids: [], taskset=str(tmp_path / "wrong.py"), **fields):
            pass
    assert "\n" not in str(raised.value)


def tool(prompt: str) -> str:
    """The name by which the prompt describes the tool."""
    found = re.search(r'"name": ?"(\w*add)"', prompt)
    assert found is not None, prompt
    return found[1]


def marked(env: VerifiersEnv) -> list[psutil.Process]:
    """The process of verifiers, and what it has started."""
    assert env.process._child is not None
    mark = env.process._child._mark
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
