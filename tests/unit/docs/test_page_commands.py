"""Every command that a page shows in a block is held to one of three promises.

it parses     the program exists and knows every flag with its value; checked here, nothing is started
RUN           a test runs it as it is on the page, with other ports and directories
not run       `<!-- not run: REASON -->` is above the block, and GitHub and the site show the block alone; what can be
              parsed of it is parsed all the same, and a test that REASON names exists
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from atropos_launcher.cli import COMMANDS as ATROPOS
from atropos_launcher.commands.doctor import DoctorConfig
from atropos_launcher.commands.evaluate import EvaluateFlags, asking
from atropos_launcher.commands.fine_tune import trainer_flags
from atropos_launcher.plan.command_line import read_command_line
from atroposlib.agents.flags import AgentEndpointConfig
from atroposlib.api.settings import RunApiConfig
from atroposlib.config import resolve_config
from atroposlib.envs.commands.cli import load_tree, with_teacher_if_given
from atroposlib.flags import ConfigError
from example_trainer.settings.config import TrainerConfig
from tests.unit.environments.support import env_class
from tests.unit.launcher.plans import PAGE_FILES, no_processes, plan

__all__ = ["no_processes"]
ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if not page.name.startswith("CHANGELOG")
)
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?)-->\n+)?^```(?:bash|sh|shell|console)\n(?P<text>.*?)^```", re.M | re.S
)
# What no flag check can judge: the page, a part of the command, the test that types it, and a part of that test.
RUN = (
    ("docs/environments.md", "colours.py", "tests/unit/envs/test_env_docs.py", "docs/environments.md"),
    ("docs/write_an_environment.md", "", "tests/unit/envs/test_env_docs.py", "docs/write_an_environment.md"),
    ("docs/security.md", "umask", "tests/unit/api/test_docs_and_benchmark.py", "security.md"),
    ("docs/security.md", "curl", "tests/unit/api/test_docs_and_benchmark.py", "security.md"),
    ("docs/operate.md", "run-api journal", "tests/unit/api/journal/test_journal_commands.py", "operate.md"),
    ("docs/operate.md", "damaged", "tests/unit/api/journal/test_journal_commands.py", "operate.md"),
    ("docs/operate.md", "cp monday.db", "tests/unit/api/journal/test_journal_commands.py", "operate.md"),
    ("docs/operate.md", "umask", "tests/unit/api/test_docs_and_benchmark.py", "docs/operate.md"),
    ("docs/troubleshooting.md", ".log", "tests/integration/test_quickstart.py", "troubleshooting.md"),
    ("docs/other_ecosystems.md", "guess.py", "tests/integration/test_openenv.py", "openenv_guess.py"),
    ("docs/install.md", "atropos completion", "tests/unit/launcher/commands/test_completion.py", "completion"),
    ("docs/install.md", "sbatch", "tests/unit/scripts/test_slurm.py", "train.sbatch"),
)
SHELL = {"export"}  # runs no program


@dataclass(frozen=True)
class Command:
    """One line of a block, its continuation lines joined."""

    page: str
    text: str
    reason: str  # why it is not run; "" where nothing is said

    @property
    def words(self) -> list[str]:
        """Its words, without the variables before them and a redirection or `&` after them."""
        words = shlex.split(self.text, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        return [word for word in words if word not in {"&", ">"}]


def commands() -> Iterator[Command]:
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            for line in block["text"].replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    yield Command(str(page.relative_to(ROOT)), line.strip(), (block["reason"] or "").strip())


COMMANDS = list(commands())


# --- what knows flags: each raises, or exits, for one that is wrong -------------------------------------------------


# Files of the reader's, which are not there, and what is in their place.
READERS = {
    "my_run.yaml": "arithmetic",
    "larger_number_server.py": "environments/template_server.py",
    "guess_server.py": "environments/two_turn_template_server.py",
    "product_server.py": "environments/tool_template_server.py",
    **PAGE_FILES,
}


def train(argv: list[str]) -> None:
    """`atropos train`, planned to the last flag of each service."""
    if "--resume" in argv:
        known_in("atropos_launcher/plan/command_line.py", argv)
        return
    plan(*[READERS.get(word, word) for word in argv])


def evaluation(argv: list[str]) -> None:
    asked = read_command_line([*argv, "--dry-run"], {}, flags=EvaluateFlags)
    assert isinstance(asked.given, EvaluateFlags)
    asking(asked.run, asked.given)


def recipe(name: str) -> Callable[[list[str]], None]:
    return lambda argv: train([name, *argv])


def trainer(argv: list[str]) -> None:
    """`...` on a page means the other flags of a run."""
    argv = ["--model-name=m", *(word for word in argv if word != "...")] if "..." in argv else argv
    resolve_config(TrainerConfig, without("--hosts-file", argv), prog="grpo", env={})


def without(flag: str, argv: list[str]) -> list[str]:
    """`argv` without a file that only the reader has."""
    if flag not in argv:
        return argv
    at = argv.index(flag)
    return argv[:at] + argv[at + 2 :]


def environment(script: str) -> Callable[[list[str]], None]:
    def check(argv: list[str]) -> None:
        command, *flags = without("--config", argv) if argv and not argv[0].startswith("-") else ["serve", *argv]
        load_tree(with_teacher_if_given(env_class(Path(script).stem), flags), command, flags, script)

    return check


def vllm(argv: list[str]) -> None:
    """Our launcher's flags, and those of the installed vLLM by the names of its fields."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = map(Path, spec.submodule_search_locations)
    sources = [ROOT / "example_trainer/vllm_api_server.py", folder / "engine/arg_utils.py"]
    sources += (folder / "entrypoints").rglob("cli_args.py")
    expect_known(argv, "\n".join(source.read_text() for source in sources))


def known_in(file: str, argv: list[str]) -> None:
    """Flags by their names in a program's source."""
    expect_known(argv, (ROOT / file).read_text())


def expect_known(argv: list[str], source: str) -> None:
    for word in argv:
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if flag.startswith("--"):
            assert f'"{flag}"' in source or re.search(rf"^    {name}: ", source, re.M), f"{flag} is not known"


def script_knows(file: str) -> Callable[[list[str]], None]:
    """A shell script names its flags in its text."""

    def check(argv: list[str]) -> None:
        text = (ROOT / file).read_text()
        assert [word for word in argv if word.startswith("-") and word not in text] == []

    return check


def checker(words: list[str]) -> Callable[[], None] | None:
    """What judges a command; None where nothing here can."""
    program, *argv = words
    if program == "python":
        return python_checker([word for word in argv if word != "-u"])
    if program == "atropos-grpo":
        return lambda: trainer(argv)
    if program == "run-api" and "journal" not in argv:
        return lambda: run_api(argv)
    if program == "atropos":
        return atropos_checker(argv)
    if not program.startswith("scripts/"):
        return None
    assert (ROOT / program).is_file(), program
    name = Path(program).stem
    if name == "quickstart" or name.startswith("run_"):
        return lambda: recipe(name.removeprefix("run_"))(argv)
    if name in {"status", "stop", "bridge_doctor", "gpu_check"}:
        return atropos_checker([name.removeprefix("bridge_").replace("_", "-"), *argv])
    return lambda: script_knows(program)(argv)


def run_api(argv: list[str]) -> None:
    argv = without("--post-token-file", without("--api-token-file", argv))
    resolve_config(RunApiConfig, argv, prog="run-api", env={"ATROPOS_API_TOKEN": "t" * 32})


def doctor(argv: list[str]) -> None:
    resolve_config(DoctorConfig, argv, prog="doctor", env={})


def agent_endpoint(argv: list[str]) -> None:
    resolve_config(AgentEndpointConfig, argv, prog="agent-endpoint", env={})


def atropos_checker(argv: list[str]) -> Callable[[], None] | None:
    command, *flags = argv
    if flags == ["--help"]:
        return lambda: known_in("atropos_launcher/cli.py", [])
    if command == "train":
        return lambda: train(flags)
    if command == "evaluate":
        return lambda: evaluation(flags)
    if command == "quickstart":
        return lambda: recipe(command)(flags)
    if command == "agent-endpoint":
        return lambda: agent_endpoint(flags)
    if command == "doctor":
        return lambda: doctor(flags)
    if command == "fine-tune":
        return lambda: trainer(trainer_flags([PAGE_FILES.get(word, word) for word in flags]))
    if command == "env" and flags[0] == "new":
        return lambda: known_in("atropos_launcher/commands/new_environment.py", flags)
    if command == "env":
        return lambda: environment(f"environments/{Path(flags[0]).stem.removesuffix('_server')}_server.py")(flags[1:])
    assert command in ATROPOS, f"atropos has no command {command}"
    return lambda: known_in(module_file(ATROPOS[command].module), flags)


def module_file(name: str) -> str:
    """The file that `python -m` runs: a module's, or a package's `__main__.py`."""
    path = name.replace(".", "/")
    return f"{path}/__main__.py" if (ROOT / path / "__main__.py").is_file() else f"{path}.py"


def python_checker(argv: list[str]) -> Callable[[], None] | None:
    program, *flags = argv
    if program == "-c":
        return None
    file = module_file(flags.pop(0)) if program == "-m" else program
    if not (ROOT / file).is_file():
        return None
    if file.startswith("environments/"):
        return lambda: environment(file)(flags)
    known = {
        "example_trainer/grpo.py": trainer,
        "example_trainer/vllm_api_server.py": vllm,
        "atroposlib/cli/run_api.py": run_api,
    }
    return lambda: known[file](flags) if file in known else known_in(file, flags)


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_every_command_of_a_page_is_understood_run_or_marked(command: Command) -> None:
    if command.words[0] in SHELL:
        return
    if judge := checker(command.words):
        judge()
    elif not command.reason:
        runs = [test for page, part, test, _ in RUN if page == command.page and part in command.text]
        assert runs, f"no test runs {command.text!r}: write `<!-- not run: REASON -->` above its block"


def test_a_test_that_runs_the_like_of_a_marked_command_exists() -> None:
    named = {test for command in COMMANDS for test in re.findall(r"tests/[\w/]+\.py", command.reason)}
    assert len(named) > 10
    assert [test for test in sorted(named) if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize(("page", "part", "test", "shown"), RUN)
def test_what_is_said_to_be_run_is_in_the_page_and_in_the_test(page: str, part: str, test: str, shown: str) -> None:
    assert any(command.page == page and part in command.text for command in COMMANDS)
    assert shown in (ROOT / test).read_text()


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    "wrong",
    [
        "atropos train arithmetic --trainer.learning_rate 1e-5",
        "atropos plot NAME --colour red",
        "atropos env new NAME --turn two",
        "atropos paint NAME",
        "scripts/run_gsm8k_broadcast.sh --dry-running",
        "scripts/bridge_doctor.sh --modes broadcast",
        "python -u example_trainer/grpo.py --model-name M --steps 4",
        "python environments/gsm8k_server.py serve --env.group_sizes 8",
        "python -m atroposlib.cli.run_api --ports 8000",
        "VLLM_ENABLE_SHARED_WEIGHTS=1 python -u example_trainer/vllm_api_server.py --modell M",
        "python benchmarks/weight_sync.py --sinks 10",
        "python -m benchmarks.peers --peer trl",
    ],
)
def test_a_wrong_flag_is_noticed(wrong: str) -> None:
    def judge() -> None:
        found = checker(Command("README.md", wrong, "").words)
        if found is None:
            pytest.fail("nothing judges it")
        found()

    with pytest.raises((AssertionError, ConfigError, SystemExit)):  # each program in its own words
        judge()


def test_each_row_of_a_table_is_one_line() -> None:
    """A row that continues on the next line is a row cut off, and a paragraph."""
    text = {page: re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in PAGES}
    assert [(page.name, row) for page in PAGES for row in re.findall(r"^\|.*[^|\s]\s*$", text[page], re.M)] == []


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 60
    assert {"README.md", "docs/quickstart.md", "docs/install.md"} < {command.page for command in COMMANDS}
