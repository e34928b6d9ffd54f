"""What the launcher says of an environment's program that prints no configuration."""

import os
from pathlib import Path

import pytest

from atropos_launcher.plan.sections import ask_environment
from atroposlib.flags import ConfigError

PYDANTIC = """from pydantic import BaseModel

class MyConfig(BaseModel):
    largest = 99
"""


@pytest.mark.services
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class MyEnv: ...\n", r"my_env.py printed no configuration; end it with `MyEnv.cli\("),
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' at .*my_env.py:1$"),
        ("def score(self)\n", r"SyntaxError: .* at .*my_env.py:1$"),
        (PYDANTIC, r"A non-annotated attribute was detected: `largest = 99`.* at .*my_env.py:3$"),
        ("raise SystemExit('my_env.py: error: there is no data')\n", r"mine: there is no data$"),
        (
            "print('env: {}\\nbye: [1')\n",
            r"my_env.py prints more than its configuration after that, such as 'bye: \[1'",
        ),
        ("raise SystemExit(3)\n", r"exit status 3, and nothing on stderr$"),
    ],
)
def test_the_error_names_what_was_raised_and_where(source: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "my_env.py"
    program.write_text(source)
    with pytest.raises(ConfigError, match=said):
        ask_environment("mine", (str(program),), {}, [], os.environ)


@pytest.mark.services
def test_what_an_environment_prints_before_its_configuration_is_passed_over(tmp_path: Path) -> None:
    program = tmp_path / "my_env.py"
    program.write_text("import os\nos.write(1, b'my env: \\xff [\\n')\nprint('env: {group_size: 4}\\n# lacks')\n")
    assert ask_environment("mine", (str(program),), {}, [], os.environ) == ({"env": {"group_size": 4}}, [])
