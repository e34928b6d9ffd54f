"""No document, help text, log line, error, docstring or comment uses a word of vocabulary.toml."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RULES = tomllib.loads((Path(__file__).parent / "vocabulary.toml").read_text())["rule"]
PATTERNS = [(re.compile(rule["pattern"], re.IGNORECASE), rule["use"]) for rule in RULES]
TOPS: tuple[str, ...] = (".ci", ".github", "atroposlib", "atropos_environments", "benchmarks", "docs", "environments")
TOPS += ("atropos_launcher", "example_trainer", "recipes", "sampler_doctor", "scripts", "tests", "vllm_patching")
KINDS = (".py", ".md", ".sh", ".yaml", ".yml")

# What stands between two words of a text that Python's source splits: quotes, line ends, comment signs.
SEAM = re.compile(r"""["'\s#]+(?:[rf]["'])?""")

Piece = tuple[int, str]  # line, text without code


def files() -> Iterator[Path]:
    for top in sorted(ROOT.iterdir()):
        if top.is_file() and top.suffix in KINDS:
            yield top
        elif top.is_dir() and top.name in TOPS:
            yield from sorted(path for path in top.rglob("*") if path.suffix in KINDS and path != Path(__file__))


def may_have_some(text: str) -> bool:
    """Whether to look at a file closely: to read all of Python's tokens would take ten seconds."""
    words = SEAM.sub(" ", text)
    return any(pattern.search(words) for pattern, _ in PATTERNS)


def pieces(path: Path) -> Iterator[Piece]:
    """The prose of a file: comments and texts of Python, everything else outside of code blocks."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from _of_python(text)
    elif path.suffix == ".md":
        yield from _of_markdown(text)
    else:
        yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if " " in line)


def _of_python(text: str) -> Iterator[Piece]:
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comment, comment_line = "", 0
    said, said_line = "", 0
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comment, comment_line = f"{comment} {token.string.lstrip('#: ')}", comment_line or token.start[0]
        elif token.type != tokenize.NL and comment:
            yield comment_line, comment
            comment, comment_line = "", 0
        if token.type == tokenize.STRING:
            said, said_line = said + _value(token.string), said_line or token.start[0]
        elif token.type not in (tokenize.NL, tokenize.COMMENT) and said:
            if " " in said:
                yield said_line, said
            said, said_line = "", 0


def _value(literal: str) -> str:
    """What a literal says; what an f-string puts in is left out."""
    prefix = re.match("[a-zA-Z]*", literal)
    assert prefix is not None
    if "f" in prefix[0].lower():
        return re.sub(r"\{[^{}]*\}", "{}", literal[len(prefix[0]) :].strip("\"'"))
    value = ast.literal_eval(literal)
    return value if isinstance(value, str) else ""


def _of_markdown(text: str) -> Iterator[Piece]:
    paragraph, start, fenced = "", 0, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif line.strip() and not fenced:
            paragraph, start = f"{paragraph}\n{line}", start or number
            continue
        if paragraph:
            yield start, paragraph.removeprefix("\n")
        paragraph, start = "", 0


def findings(where: str, pieces: Iterator[Piece]) -> list[str]:
    found = []
    for line, text in pieces:
        prose = " ".join(re.sub(r"`+[^`]*`+", "CODE", text).split())
        for pattern, use in PATTERNS:
            for match in pattern.finditer(prose):
                around = prose[max(0, match.start() - 30) : match.end() + 30]
                found.append(f"{where}:{line}: '{match[0]}' in '...{around}...': write {use}")
    return found


def test_the_project_uses_the_words_of_its_field() -> None:
    found = []
    for path in files():
        if may_have_some(path.read_text()):
            found += findings(str(path.relative_to(ROOT)), pieces(path))
    assert not found, f"{len(found)} oddities (tests/unit/docs/vocabulary.toml):\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("You get a line a step.", 1),
        ("The folder is gone.", 1),
        ("`a line a step` and `folder` are code.", 0),
        ("The server stays away.", 1),
        ("The engine stands still; one instance a worker.", 2),
        ("One line per step, in a directory.", 0),
    ],
)
def test_oddities_are_found_and_code_is_not_read(text: str, count: int) -> None:
    assert len(findings("page.md", _of_markdown(text))) == count


def test_texts_of_python_are_read_as_they_are_shown() -> None:
    source = 'x = (\n    "a line"\n    " a step"\n)\n# the engine\n# stands still\nlog.info(f"{rooms} {kind}")\n'
    found = findings("x.py", _of_python(source))
    assert [line.split(":")[1] for line in found] == ["2", "5"]


WIDE_CLAIM = re.compile(r"\b(?:nobody|no ?one else|no other (?:project|framework))\b", re.IGNORECASE)


def test_readers_get_no_claim_about_all_other_projects() -> None:
    """A comparison names one peer, its version and the command, so that it can be repeated."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
    prose = {path: re.sub(r"`+[^`]*`+", "", path.read_text()) for path in pages}
    assert [(path.name, match[0]) for path, text in prose.items() for match in WIDE_CLAIM.finditer(text)] == []
