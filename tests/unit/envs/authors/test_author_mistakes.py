"""Mistakes made on purpose, one a case: an author's program runs as it would be typed, and its last line names the
file, the line, the method, the rule and the remedy.
"""

import asyncio
import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer

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


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Of a fake inference server in a thread, and the directory of its tokenizer."""
    tokenizer = str(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    loop, found, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls = []

    async def serve() -> None:
        async with FakeInferenceServer(lambda prompt: ["a", "bb", "ccc"], tokenizer_folder=tokenizer) as server:
            urls.append(server.base_url)
            found.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    assert found.wait(30)
    yield urls[0], tokenizer
    loop.call_soon_threadsafe(done.set)
    thread.join(30)
    loop.close()


@pytest.fixture
def desk(address: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Desk(tmp_path, *address)
    for number, handler in handlers.items():
        signal.signal(number, handler)


PROCESS = ("process", "--env.total_steps", "2", "--env.max_failed_items", "2", "--env.max_fruitless_items", "3")
BUDGET = "3 of the last 3 items failed in the environment's own code (limit 2, --env.max_failed_items)"
AGAIN = "(the same error 2 more times). Correct that line"
PAIR = "a list of items for later: `return rollout, []`"
RAISES = marked("return {}['level']")
# name: (program, what its last line says of `# here`, what else it says)
MISTAKES = {
    "no score": (
        without(QUESTION, "score"),
        "MyEnv ({})",
        ["scores nothing: write score(self, item, answer)"],
    ),
    "no prompt": (without(QUESTION, "prompt"), "MyEnv ({}) has no prompt", ["write `def prompt(self, item)`"]),
    "no training_item": (without(QUESTION, "training_item"), "MyEnv ({}) has no training_item", ["(self, number)`"]),
    "no evaluate": (
        without(GROUPS, "evaluate"),
        "MyEnv ({}) has no evaluate",
        ['returns metrics, such as {"accuracy"'],
    ),
    "no collect_trajectory": (without(GROUPS, "collect_trajectory"), "MyEnv ({}) has no collect_trajectory", [PAIR]),
    "prompt is a coroutine": (
        changed(QUESTION, (PROMPT_DEF, marked("async " + PROMPT_DEF))),
        "{} in prompt is a coroutine",
        ["write `def prompt(self, item)`"],
    ),
    "reference_answer is a coroutine": (
        changed(
            QUESTION,
            (SCORE_DEF, f"async def reference_answer(self, item):  # here\n        return item\n\n    {SCORE_DEF}"),
        ),
        "{} in reference_answer is a coroutine",
        ["write `def reference_answer(self, item)`"],
    ),
    "outcomes is a text": (
        changed(
            QUESTION, ("MyEnv(QuestionEnv):", marked("MyEnv(QuestionEnv):")), (NAME, f'{NAME}    outcomes = ("ok")\n')
        ),
        "MyEnv ({})",
        ["outcomes is the text 'ok': write a tuple, such as (\"ok\",)"],
    ),
    "outcomes is a metric": (
        changed(
            QUESTION,
            ("MyEnv(QuestionEnv):", marked("MyEnv(QuestionEnv):")),
            (NAME, f'{NAME}    outcomes = ("late", "total", "correct")\n'),
        ),
        "MyEnv ({})",
        ["outcomes has correct, total, which every evaluation counts itself: rename it"],
    ),
    "config_init raises": (
        changed(
            QUESTION,
            (NAME, f"{NAME}\n    @classmethod\n    def config_init(cls):\n        {RAISES}\n"),
        ),
        "{} in config_init",
        ["config_init failed: KeyError: 'level'", "Correct that line"],
    ),
    "config_init gives the configuration alone": (
        changed(QUESTION, (NAME, f"{NAME}\n    {INIT_DEF}\n        return cls.env_config_cls()\n")),
        "{} in config_init",
        [
            "config_init returned QuestionEnvConfig",
            "instead of its configuration and its server: `return config, server`",
        ],
    ),
    "a validator of the settings raises": (
        changed(
            QUESTION,
            ("import QuestionEnv\n", "import QuestionEnv, QuestionEnvConfig\nfrom pydantic import model_validator\n"),
            (
                "class MyEnv",
                'class MyConfig(QuestionEnvConfig):\n    @model_validator(mode="after")\n    def known(self):\n'
                f"        {RAISES}\n\n\nclass MyEnv",
            ),
            (NAME, f"{NAME}    env_config_cls = MyConfig\n"),
        ),
        "{} in known",
        ["the configuration failed: KeyError: 'level'", "Correct that line"],
    ),
    "prompt without its parameter": (
        changed(QUESTION, (PROMPT_DEF, marked("def prompt(self):"))),
        "{} in prompt has the parameters (self)",
        ["write `def prompt(self, item)`"],
    ),
    "prompt returns a text": (
        changed(QUESTION, (PROMPT_DEF, marked(PROMPT_DEF)), (PROMPT_RETURN, "return item")),
        "{} in prompt",
        [BUDGET, "prompt returned str 'word 2'", MESSAGES, AGAIN],
    ),
    "prompt forgets return": (
        changed(QUESTION, (PROMPT_DEF, marked(PROMPT_DEF)), (PROMPT_RETURN, "[item]")),
        "{} in prompt",
        [BUDGET, "prompt returned None", MESSAGES, AGAIN],
    ),
    "prompt with a message without content": (
        changed(
            QUESTION, (PROMPT_RETURN, 'return [{"role": "user", "contents": item}]'), (PROMPT_DEF, marked(PROMPT_DEF))
        ),
        "{} in prompt",
        [BUDGET, "prompt returned list [{'role': 'user', 'contents': 'word 2'}]", MESSAGES, AGAIN],
    ),
    "prompt with a wrong key": (
        changed(QUESTION, (PROMPT_DEF, marked(PROMPT_DEF)), ('"role"', '"rôle"')),
        "{} in prompt",
        [BUDGET, "prompt returned list [{'rôle'", MESSAGES, AGAIN],
    ),
    "prompt that the chat template refuses": (
        changed(QUESTION, (PROMPT_DEF, marked(PROMPT_DEF)), ('"content": item', '"content": 7')),
        "{} in prompt",
        [BUDGET, "ValueError: messages[0].content is 7: expected text", AGAIN],
    ),
    "prompt raises": (
        changed(QUESTION, (PROMPT_RETURN, marked('return [{"role": "user", "content": item["text"]}]'))),
        "{} in prompt",
        [BUDGET, "TypeError: string indices must be integers", AGAIN],
    ),
    "training_item forgets return": (
        changed(
            QUESTION,
            ("async def training_item(self, number):", marked("async def training_item(self, number):")),
            ('return f"word {number}"', 'f"word {number}"'),
        ),
        "{} in training_item",
        ["the environment has no more items: None came from"],
    ),
    "training_item raises": (
        changed(QUESTION, ('return f"word {number}"', marked("return [][number]"))),
        "{} in training_item",
        [BUDGET, "that get_next_item was to give: IndexError: list index out of range", AGAIN],
    ),
    "score waits for what was cancelled": (
        changed(QUESTION, (SCORE_RETURN, f"{CANCELLED}; {marked('await late')}")),
        "{} in score",
        [BUDGET, "'word 2': RuntimeError: what it waited for was cancelled (CancelledError)", AGAIN],
    ),
    "training_item waits for what was cancelled": (
        changed(QUESTION, ('return f"word {number}"', f"{CANCELLED}; {marked('await late')}")),
        "{} in training_item",
        [BUDGET, "RuntimeError: what it waited for was cancelled (CancelledError)", AGAIN],
    ),
    "score raises": (
        changed(QUESTION, (SCORE_RETURN, marked("return item.split()[7]"))),
        "{} in score",
        [BUDGET, "'word 2': IndexError: list index out of range", AGAIN],
    ),
    "score forgets return": (
        changed(QUESTION, (SCORE_DEF, marked(SCORE_DEF)), (SCORE_RETURN, "float(len(answer))")),
        "{} in score",
        [
            "3 items in a row gave no group",
            "score has returned None for ",
            "return a number for each",
        ],
    ),
    "score forgets return in one branch": (
        changed(
            QUESTION,
            (SCORE_DEF, marked(SCORE_DEF)),
            (SCORE_RETURN, "if item == 'word 0':\n            return 1.0"),
        ),
        "{} in score",
        [
            "3 items in a row gave no group",
            "score has returned None for ",
            "return a number for each that can be scored (",
        ],
    ),
    "score returns a text": (
        changed(QUESTION, (SCORE_DEF, marked(SCORE_DEF)), (SCORE_RETURN, "return 'good'")),
        "{} in score",
        [BUDGET, "score returned str 'good' instead of a number", AGAIN],
    ),
    "a reward returns a text": (
        changed(
            QUESTION, (SCORE_DEF, "@reward(weight=0.5)  # here\n    def kind(self, item, answer):"), *REWARD_RETURN
        ),
        "{} in kind",
        [BUDGET, "kind returned str 'good' instead of a number", AGAIN],
    ),
    "score with other parameters": (
        changed(
            QUESTION,
            (SCORE_DEF, "async def score(self, answer):"),
            ("MyEnv(QuestionEnv):", "MyEnv(QuestionEnv):  # here"),
        ),
        "MyEnv ({})",
        ["MyEnv.score(answer) is called with the item and the answer"],
    ),
    "score without self": (
        changed(
            QUESTION,
            (SCORE_DEF, "async def score(item, answer):"),
            ("MyEnv(QuestionEnv):", "MyEnv(QuestionEnv):  # here"),
        ),
        "MyEnv ({})",
        ["write self before item"],
    ),
    "setup yields": (
        changed(QUESTION, ("async def setup(self):", "async def setup(self):  # here\n        yield")),
        "{} in setup gives its result with `yield`",
        ["give it with `return`: write `async def setup(self)`"],
    ),
    "training_item yields": (
        changed(
            QUESTION,
            ("async def training_item(self, number):", "def training_item(self, number):  # here"),
            ('return f"word', 'yield f"word'),
        ),
        "{} in training_item gives its result with `yield`",
        ["write `async def training_item(self, number)`, which returns question 0"],
    ),
    "a reward returns NaN": (
        changed(
            QUESTION,
            (SCORE_DEF, "@reward(weight=0.5)  # here\n    def kind(self, item, answer):"),
            (SCORE_RETURN, "return float('nan')"),
            REWARD_RETURN[1],
        ),
        "{} in kind",
        [BUDGET, "kind returned float nan instead of a finite number, or None", AGAIN],
    ),
    "rollouts returns one without sequences": (
        changed(
            QUESTION,
            (
                SCORE_DEF,
                "async def rollouts(self, item, n, *settings):  # here\n        return [Rollout('a', [], [])]\n\n"
                f"    {SCORE_DEF}",
            ),
            ("import QuestionEnv", "import QuestionEnv, Rollout"),
        ),
        "{} in rollouts",
        [BUDGET, 'instead of a Rollout with sequences, such as managed.get_state()["nodes"]', AGAIN],
    ),
    "a Scored of a text": (
        changed(
            QUESTION,
            (SCORE_DEF, marked(SCORE_DEF)),
            (SCORE_RETURN, "return Scored('right', 1.0)"),
            ("import QuestionEnv", "import QuestionEnv, Scored"),
        ),
        "{} in score",
        [BUDGET, "score returned Scored Scored(reward='right', outcome=1.0, rewards={}) instead of a number", AGAIN],
    ),
    "settings of another kind of environment": (
        changed(
            QUESTION,
            (
                "\n\nclass",
                "\nfrom atroposlib.envs.base import BaseEnvConfig\n\n"
                "class MyConfig(BaseEnvConfig):  # here\n    pass\n\nclass",
            ),
            (NAME, f"{NAME}    env_config_cls = MyConfig\n"),
        ),
        "MyConfig ({})",
        ["has not the settings that a QuestionEnv needs; write `class MyConfig(QuestionEnvConfig)`"],
    ),
    "score returns NaN": (
        changed(QUESTION, (SCORE_DEF, marked(SCORE_DEF)), (SCORE_RETURN, "return float('nan')")),
        "{} in score",
        [BUDGET, "scores [nan, nan, nan, nan] are not all finite", AGAIN],
    ),
    "rollouts returns texts": (
        changed(
            QUESTION,
            (
                SCORE_DEF,
                f"async def rollouts(self, item, n, *settings):  # here\n        return ['a']\n\n    {SCORE_DEF}",
            ),
        ),
        "{} in rollouts",
        [BUDGET, "rollouts returned list ['a'] instead of a list of 1 Rollout", AGAIN],
    ),
    "masks too short": (
        changed(GROUPS, (COLLECT_DEF, marked(COLLECT_DEF)), ("node.masked_tokens", "node.masked_tokens[1:]")),
        "{} in collect_trajectory",
        [BUDGET, "sequence 0: ", " masks for ", AGAIN],
    ),
    "a rollout without scores": (
        changed(GROUPS, (COLLECT_DEF, marked(COLLECT_DEF)), ('"scores"', '"score"')),
        "{} in collect_trajectory",
        [BUDGET, "instead of a dict with tokens, masks, scores", AGAIN],
    ),
    "no tuple": (
        changed(GROUPS, (COLLECT_DEF, marked(COLLECT_DEF)), (COLLECT_RETURN, COLLECT_RETURN.removesuffix(", []"))),
        "{} in collect_trajectory",
        [BUDGET, "collect_trajectory returned dict {'tokens'", f"instead of one scored rollout and {PAIR}", AGAIN],
    ),
    "two rollouts of four": (
        changed(
            GROUPS,
            ("collect_trajectory(self", "one(self"),
            (
                "    async def evaluate",
                "    async def collect_trajectories(self, item):  # here\n"
                "        return group_items([(await self.one(item))[0] for _ in range(2)]), []\n\n"
                "    async def evaluate",
            ),
        ),
        "{} in collect_trajectories",
        ["3 items in a row gave no group", "2 rollouts instead of 4 (group_size)"],
    ),
    "setup raises": (
        changed(QUESTION, ('self.held_out = ["a", "b"]', marked("self.held_out = open('nowhere')"))),
        "{} in setup",
        ["setup failed: FileNotFoundError", "'nowhere'", "Correct that line"],
    ),
    "held_out is a generator": (
        changed(
            QUESTION,
            ("setup(self):", "setup(self):  # here"),
            ('self.held_out = ["a", "b"]', "self.held_out = (each for each in 'ab')"),
        ),
        "{} in setup",
        ["set held_out to <generator object", "make it a list"],
    ),
    "__init__ without that of its base class": (
        changed(QUESTION, (NAME, f"    def __init__(self, *given):  # here\n        self.mine = given\n\n{NAME}")),
        "{} in __init__",
        ["__init__ failed: AttributeError: 'MyEnv' object has no attribute 'server'", "Correct that line"],
    ),
    "a validator forgets return": (
        changed(
            QUESTION,
            ("import QuestionEnv\n", "import QuestionEnv, QuestionEnvConfig\nfrom pydantic import model_validator\n"),
            (
                "class MyEnv",
                'class MyConfig(QuestionEnvConfig):  # here\n    @model_validator(mode="after")\n    def known(self):\n'
                "        assert self.seed >= 0\n\n\nclass MyEnv",
            ),
            (NAME, f"{NAME}    env_config_cls = MyConfig\n"),
        ),
        "MyConfig ({})",
        ["a validator gave None; end it with `return self`"],
    ),
    "__init__ with other parameters": (
        changed(
            QUESTION,
            ("    name", "    def __init__(self, config):  # here\n        super().__init__(config)\n\n    name"),
        ),
        "{} in __init__",
        ["__init__ failed: TypeError", "positional arguments", "Correct that line"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_a_line_that_names_its_place_the_rule_and_the_remedy(desk: Desk, name: str) -> None:
    source, place, others = MISTAKES[name]
    ended = desk.run(source, *PROCESS)
    assert ended.code == 1
    for said in [place.format(desk.here), *others]:
        assert said in ended.last_line
    assert ended.text.count("Traceback") <= 1
    assert ended.text.count(desk.here) <= 2 + ended.text.count("Traceback") + 3 * name.startswith("score forgets")
    assert all(path.stat().st_size for path in desk.program.parent.glob("data/*"))  # no empty file is left


def test_a_method_that_only_the_authors_base_class_lacks_is_the_authors_alone(desk: Desk) -> None:
    own = "async def prompt(self, one, two):\n        yield one\n\n    def rollouts(self):\n        return 7\n\n    "
    assert desk.run(changed(GROUPS, (COLLECT_DEF, own + COLLECT_DEF)), *PROCESS).code == 0


def test_an_outcome_that_is_not_declared_is_told_and_costs_no_answer(desk: Desk) -> None:
    source = changed(
        QUESTION,
        ("import QuestionEnv", "import QuestionEnv, Scored"),
        (NAME, f'{NAME}    outcomes = ("right", "wrong")\n'),
        (SCORE_DEF, marked(SCORE_DEF)),
        (SCORE_RETURN, 'return Scored(float(len(answer)), "rihgt")'),
    )
    ended = desk.run(source, *PROCESS)
    assert ended.code == 0
    told = "score gave the outcome 'rihgt', which no metric counts: name it in outcomes, which has right, wrong"
    assert ended.text.count(f"{told} ({desk.here} in score)") == 1


CLOSE = f"def close(self):\n        self.never_made.close()  # here\n\n    {SCORE_DEF}"


def test_a_close_that_raises_is_told_and_costs_nothing_else(desk: Desk) -> None:
    ended = desk.run(changed(QUESTION, (SCORE_DEF, CLOSE)), *PROCESS)
    assert ended.code == 0
    assert f"close failed: AttributeError: 'MyEnv' object has no attribute 'never_made' at {desk.here}" in ended.text
    assert (desk.program.parent / "data/mine.html").is_file()
    setup = ('self.held_out = ["a", "b"]', "self.held_out = open('nowhere')")
    ended = desk.run(changed(QUESTION, (SCORE_DEF, CLOSE), setup), *PROCESS)
    assert ended.code == 1
    assert "setup failed: FileNotFoundError" in ended.last_line


def test_a_close_that_does_not_return_is_ended(desk: Desk) -> None:
    soon = "import asyncio\nimport atroposlib.envs.question_env\natroposlib.envs.question_env.CLOSE_S = 0.1\n"
    waits = f"async def close(self):\n        await asyncio.sleep(3600)  # here\n\n    {SCORE_DEF}"
    ended = desk.run(soon + changed(QUESTION, (SCORE_DEF, waits)), *PROCESS)
    assert ended.code == 0
    assert "close did not return within 0.1 s, and was ended: TimeoutError" in ended.text
    assert f"{desk.here} in close" in ended.text


HELD = """
import logging
import threading
from atroposlib.envs.commands import cli

cli.LASTING_TOLD_AFTER_S = 0.1
told = threading.Event()


class Ear(logging.Handler):
    def emit(self, record):
        if "Python waits" in record.getMessage():
            told.set()


def hold():
    told.wait(60)  # here


logging.getLogger(cli.__name__).addHandler(Ear())
"""


def test_work_for_which_a_command_that_is_done_does_not_end_is_named(desk: Desk) -> None:
    holds = f"import asyncio\n        asyncio.get_running_loop().run_in_executor(None, hold)\n        {SCORE_RETURN}"
    ended = desk.run(HELD + changed(QUESTION, (SCORE_RETURN, holds)), *PROCESS)
    assert ended.code == 0
    assert f"thread asyncio_0 at {desk.here} in hold" in ended.text
    assert "end that work; Ctrl-C ends all now" in ended.text


@pytest.mark.services
def test_so_is_a_thread_of_the_authors_and_ctrl_c_ends_it(desk: Desk) -> None:
    kept = HELD.replace("told.wait(60)", "threading.Event().wait(60)")
    start = 'self.held_out = ["a"]; threading.Thread(target=hold).start()'
    desk.program.write_text(kept + changed(QUESTION, ('self.held_out = ["a", "b"]', start)))
    flags = ["--openai.base_url", desk.url, "--env.tokenizer_name", desk.tokenizer, "--openai.server_type", "vllm"]
    command = [sys.executable, str(desk.program), *PROCESS, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        told = next(line for line in program.stderr if "Python waits" in line)
        program.send_signal(signal.SIGINT)
        rest = program.stderr.read()
    assert f"hold) at {desk.here} in hold" in told
    assert "closed" not in rest
    assert program.returncode == 130


@pytest.mark.parametrize("method", ["setup", "training_item", "score"])
def test_a_method_may_be_a_plain_function(desk: Desk, method: str) -> None:
    assert desk.run(changed(QUESTION, (f"async def {method}", f"def {method}")), *PROCESS).code == 0


@pytest.mark.parametrize("command", [PROCESS, ("evaluate",)])
def test_so_may_those_of_a_plain_environment(desk: Desk, command: tuple[str, ...]) -> None:
    plain = changed(GROUPS, *((f"async def {name}", f"def {name}") for name in ("get_next_item", "evaluate")))
    assert desk.run(plain, *command).code == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (changed(QUESTION, (SCORE_RETURN, marked("return [][1]"))), "{} in score"),
        (changed(GROUPS, ('return {"accuracy": 0.5}', marked("return {}['accuracy']"))), "{} in evaluate"),
        (
            changed(GROUPS, ("evaluate(self):", "evaluate(self):  # here"), ('{"accuracy": 0.5}', "0.5")),
            'evaluate returned float 0.5 instead of metrics, such as {{"accuracy": 0.5}} at {} in evaluate',
        ),
    ],
    ids=["score", "evaluate", "no metrics"],
)
def test_an_evaluation_that_fails_ends_in_one_line(desk: Desk, source: str, said: str) -> None:
    ended = desk.run(source, "evaluate", "--openai.model_name", "fake", "--openai.server_type", "vllm")
    assert ended.code == 1
    assert said.format(desk.here) in ended.last_line
    assert ended.last_line.endswith("Correct that line")
    assert ended.text.count("Traceback") <= 1


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
