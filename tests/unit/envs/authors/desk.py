"""Programs of an author, to be spoiled, and the desk where they run."""

import contextlib
import io
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# `# here` marks the line that is to be named.
QUESTION = """
from atroposlib.envs.question_env import QuestionEnv


class MyEnv(QuestionEnv):
    name = "mine"

    async def setup(self):
        self.held_out = ["a", "b"]

    async def training_item(self, number):
        return f"word {number}"

    def prompt(self, item):
        return [{"role": "user", "content": item}]

    async def score(self, item, answer):
        return float(len(answer))


if __name__ == "__main__":
    MyEnv.cli()
"""
GROUPS = """
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.payloads import group_items


class MyEnv(BaseEnv):
    name = "mine"

    async def get_next_item(self):
        return "word"

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[{"role": "user", "content": item}], max_tokens=8)
            node = managed.get_state()["nodes"][0]
        rollout = {"tokens": node.tokens, "masks": node.masked_tokens, "inference_logprobs": node.logprobs}
        return {**rollout, "scores": 1.0}, []

    async def evaluate(self):
        return {"accuracy": 0.5}


if __name__ == "__main__":
    MyEnv.cli()
"""
MESSAGES = 'instead of a list of messages, such as [{"role": "user", "content": "..."}]'
REWARD_RETURN = (
    ("return float(len(answer))", "return 'good'"),
    ("import QuestionEnv", "import QuestionEnv, reward"),
)
PROMPT_DEF, SCORE_DEF = "def prompt(self, item):", "async def score(self, item, answer):"
PROMPT_RETURN, SCORE_RETURN = 'return [{"role": "user", "content": item}]', "return float(len(answer))"
CANCELLED = "import asyncio; late = asyncio.ensure_future(asyncio.sleep(60)); late.cancel()"
INIT_DEF = "@classmethod  # here\n    def config_init(cls):"
NAME = '    name = "mine"\n'
COLLECT_DEF, COLLECT_RETURN = "async def collect_trajectory(self, item):", 'return {**rollout, "scores": 1.0}, []'


def changed(program: str, *changes: tuple[str, str]) -> str:
    """`program` with each first text in place of the second; a method that becomes nothing goes whole."""
    for old, new in changes:
        assert old in program, old
        program = program.replace(old, new)
    return program


def without(program: str, method: str) -> str:
    """`program` without a method; its class is to be named."""
    kept, count = re.subn(rf"    (async )?def {method}\(.*?\n(?=\n)\n?", "", program, flags=re.DOTALL)
    assert count == 1
    return kept.replace("Env):", "Env):  # here")


def marked(line: str) -> str:
    return f"{line}  # here"


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it wrote to stderr."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        return self.text.splitlines()[-1]


class Desk:
    """Where an author's program lies and runs, beside an inference server that answers."""

    def __init__(self, folder: Path, url: str, tokenizer: str) -> None:
        self.program = folder / "my_env.py"
        self.url = url
        self.tokenizer = tokenizer

    def run(self, source: str, *arguments: str, url: str = "") -> Ended:
        """Run `source` as a program with `arguments`, and the flags without which nothing works."""
        self.program.write_text(source)
        flags = ["--openai.base_url", url or self.url]
        if "--openai.server_type" not in arguments:
            flags += ["--openai.server_type", "vllm"]
        if not any("tokenizer_name" in argument for argument in arguments):
            flags += ["--env.tokenizer_name", self.tokenizer]
        written = io.StringIO()
        sys.argv = [str(self.program), *arguments, *flags]
        with contextlib.redirect_stderr(written), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(self.program), run_name="__main__")
        return Ended(int(ended.value.code or 0), written.getvalue())

    @property
    def here(self) -> str:
        """`my_env.py:17`, where `# here` stands."""
        (line,) = (at for at, text in enumerate(self.program.read_text().splitlines(), 1) if "# here" in text)
        return f"{self.program}:{line}"


PROCESS = ("process", "--env.total_steps", "2", "--env.max_failed_items", "2", "--env.max_fruitless_items", "3")
