"""A handler of any exception uses the error, raises it again, or says in a comment why it may drop it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = (
    "atroposlib",
    "atropos_launcher",
    "environments",
    "example_trainer",
    "sampler_doctor",
    "vllm_patching",
    "tests/contract",
)
BROAD = {None, "Exception", "BaseException"}


def silent(text: str) -> list[int]:
    """Return the lines of the handlers of any exception that drop it without a word."""
    lines = text.splitlines()
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    return [
        handler.lineno
        for handler in handlers
        if (handler.type.id if isinstance(handler.type, ast.Name) else handler.type) in BROAD
        and handler.name is None
        and not (isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None)
        and "#" not in lines[handler.lineno - 1]
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_handler_drops_any_exception_without_a_word(folder: str) -> None:
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources
    assert {str(path): found for path in sources if (found := silent(path.read_text()))} == {}


@pytest.mark.parametrize(("handler", "expected"), [
    ("except Exception:\n    pass", [3]),
    ("except:\n    pass", [3]),
    ("except Exception:  # theirs may raise anything\n    pass", []),
    ("except Exception as error:\n    print(error)", []),
    ("except BaseException:\n    close()\n    raise", []),
    ("except ValueError:\n    pass", []),
])  # fmt: skip
def test_which_handlers_are_silent(handler: str, expected: list[int]) -> None:
    assert silent(f"try:\n    work()\n{handler}\n") == expected
