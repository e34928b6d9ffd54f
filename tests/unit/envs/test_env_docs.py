import asyncio
import re
import shlex
import sys
from pathlib import Path

import pytest

from atroposlib.config import resolve_config
from atroposlib.envs.cli import load_tree
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from example_trainer.config import TrainerConfig
from tests.unit.environments.support import env_class

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/environments.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


async def run(*command: str, cwd: Path) -> str:
    """What a command prints; it must succeed."""
    pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=cwd, stdout=pipe, stderr=out)
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, printed.decode()
    return printed.decode()


@pytest.mark.parametrize("command", [command for command in COMMANDS if "environments/" in command])
def test_command_of_the_page_has_flags_that_exist(command: str) -> None:
    _, script, *arguments = shlex.split(command)
    assert load_tree(env_class(Path(script).stem), "serve", arguments[1:], script).env.group_size >= 4


async def test_environment_of_the_page_runs_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "colours.py").write_text(CODE[0])
    tokenizer = save_tiny_tokenizer(tmp_path / "tokenizer")
    command = next(command for command in COMMANDS if "colours.py" in command).replace("path/to/a/tokenizer", str(tokenizer))
    async with FakeInferenceServer(lambda prompt: ["It is blue.", "No idea."]) as server:
        await run(*shlex.split(command)[1:], "--openai.base_url", server.base_url, cwd=tmp_path)
        evaluated = ["colours.py", "evaluate", "--env.tokenizer_name", str(tokenizer), "--openai.base_url", server.base_url]
        assert "'accuracy': 1.0" in await run(*evaluated, cwd=tmp_path)
    assert (tmp_path / "data/colours.html").read_text().count("score 1<") == 4


GUIDE = (ROOT / "docs/write_an_environment.md").read_text()


def test_code_of_the_guide_is_the_template_and_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert code == (ROOT / "environments/template_server.py").read_text()
    assert len(code.splitlines()) < 60


async def test_command_of_the_guide_tries_the_template_without_a_model(tmp_path: Path) -> None:
    command = next(line for line in GUIDE.splitlines() if "template_server.py process" in line)
    tokenizer = save_tiny_tokenizer(tmp_path / "tokenizer")
    arguments = shlex.split(command.replace("path/to/a/tokenizer", str(tokenizer)))[1:]
    async with FakeInferenceServer(lambda prompt: "It is 50.") as server:
        await run(str(ROOT / arguments[0]), *arguments[1:], "--openai.base_url", server.base_url, cwd=tmp_path)
    assert (tmp_path / "data/larger_number.html").read_text().count("Which number is larger") == 8


def test_training_commands_of_the_guide_have_flags_that_exist() -> None:
    commands = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)]
    trainer = next(command for command in commands if "example_trainer/grpo.py" in command)
    config, _ = resolve_config(TrainerConfig, trainer[3:], prog="grpo", env={})
    serve = next(command for command in commands if "serve" in command)
    tree = load_tree(env_class("template_server"), "serve", serve[3:], "template")
    assert tree.env.group_size == 8 and config.training_steps == 12 and config.batch_size % tree.env.group_size == 0
