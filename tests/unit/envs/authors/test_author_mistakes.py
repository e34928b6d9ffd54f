"""Mistakes made on purpose, one a case: an author's program runs as it would be typed, and its last line names the
file, the line, the method, the rule and the remedy.
"""

import signal
import subprocess
import sys

import pytest

from tests.unit.envs.authors.desk import (
    CANCELLED,
    COLLECT_DEF,
    COLLECT_RETURN,
    GROUPS,
    INIT_DEF,
    MESSAGES,
    NAME,
    PROCESS,
    PROMPT_DEF,
    PROMPT_RETURN,
    QUESTION,
    REWARD_RETURN,
    SCORE_DEF,
    SCORE_RETURN,
    Desk,
    changed,
    marked,
    without,
)

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
    "the name has a line break": (
        changed(
            QUESTION, ("MyEnv(QuestionEnv):", marked("MyEnv(QuestionEnv):")), (NAME, '    name = "a\\nb\\x1b[31m"\n')
        ),
        "MyEnv ({}) has the name 'a\\nb\\x1b[31m'",
        ["write `name` as text of at most 128 printable characters"],
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
    "config_init ends the program": (
        changed(
            QUESTION, (NAME, f"{NAME}\n    @classmethod\n    def config_init(cls):\n        {marked('exit(0)')}\n")
        ),
        "{} in config_init",
        ["config_init failed: SystemExit: 0", "Correct that line"],
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
        [BUDGET, "scores[0]: nan is not a finite number", AGAIN],
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
