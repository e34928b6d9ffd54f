"""Plants small errors in the product, one at a time, and tells which of them the tests notice.

    python benchmarks/planted_errors.py [--areas data,loss] [--only NAME] [--slow] [--minutes N] [--out FILE.json]

A refactoring must not lose what the tests catch: run it before and after. The errors are in planted_errors.toml, each
with a text that stands once in the product, what takes its place, and the test files that should notice. Modules and
tests are found by text and by name, so that both may move; an error whose text stands nowhere, or twice, is reported.

    clone of HEAD, one per worker ──plant──▶ pytest of the named files ──▶ caught | missed ──undo──▶ the next error

The checkout is never touched. First the same tests run without an error: a test that fails by itself proves nothing.
A run continues an earlier one of the same commit, by the file of --out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).parents[1]
ERRORS = Path(__file__).with_suffix(".toml")
OUTSIDE = frozenset({"tests", "benchmarks", "docs"})
LIMIT_S = 300.0  # for the tests of one error; a planted error may make them hang, which is noticed, too
WORKERS = 2
OPTIONS = "-q --no-header --tb=no -rfE -p no:cacheprovider --third all".split()
NO_FAILURE, FAILURES, BROKEN = 0, 1, 2  # exit statuses of pytest; BROKEN: a test file could not be imported

Outcome = Literal["caught", "missed"]


class CannotPlant(Exception):
    """An error, or its tests, that this tree does not have; the message names it."""


@dataclass(frozen=True)
class Planted:
    """One error: `old`, which stands once in the product, becomes `new`, and `tests` should notice.

    A test is a file's name without its ending, with `::FUNCTION` for one test of it. The tests of a `slow` error start
    processes or take long.
    """

    name: str
    area: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False


@dataclass(frozen=True)
class Result:
    """Records what the tests made of one error; `by` is the first test that failed."""

    name: str
    area: str
    outcome: Outcome
    seconds: float
    by: str = ""


@dataclass
class Report:
    """The results of one commit, as the JSON file holds them."""

    commit: str
    machine: str = field(default_factory=lambda: f"{os.cpu_count()} cores, Python {platform.python_version()}")
    passes_without: bool = False  # whether all these tests pass without a planted error
    results: list[Result] = field(default_factory=list)
    not_planted: dict[str, str] = field(default_factory=dict)  # name: why

    def write(self, path: Path) -> None:
        """Replace the file."""
        unfinished = path.with_name(f".{path.name}.new")
        unfinished.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def read_errors(path: Path = ERRORS) -> list[Planted]:
    """The errors of the file, in its order."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))["error"]
    return [Planted(**each | {"tests": tuple(each["tests"])}) for each in found]


def product_files(root: Path) -> list[Path]:
    """The product's Python files in a checkout."""
    return [root / name for name in _tracked(root) if name.suffix == ".py" and name.parts[0] not in OUTSIDE]


def find(error: Planted, root: Path) -> Path:
    """The file that holds the error's text. Raises CannotPlant unless it stands there once, and nowhere else."""
    found = [(path, count) for path in product_files(root) if (count := path.read_text().count(error.old))]
    if len(found) != 1 or found[0][1] != 1:
        places = ", ".join(f"{path.relative_to(root)} ({count})" for path, count in found) or "no file"
        raise CannotPlant(f"its text must stand once in the product, and stands in {places}")
    return found[0][0]


def test_ids(error: Planted, root: Path) -> list[str]:
    """The error's tests as pytest takes them, of every file of that name. Raises CannotPlant for a name without one."""
    ids = []
    for test in error.tests:
        stem, colons, function = test.partition("::")
        found = sorted((root / "tests").rglob(f"{stem}.py"))
        if not found:
            raise CannotPlant(f"no test file is called {stem}.py")
        ids += [f"{path.relative_to(root)}{colons}{function}" for path in found]
    return ids


@contextmanager
def planted(error: Planted, root: Path) -> Iterator[None]:
    """Put the error in `root` while the tests run. Raises CannotPlant."""
    path = find(error, root)
    before = path.read_text()
    path.write_text(before.replace(error.old, error.new))
    try:
        yield
    finally:
        path.write_text(before)


def try_out(error: Planted, root: Path) -> Result:
    """Run the tests of one error in a clone. Raises CannotPlant."""
    start = time.monotonic()
    with planted(error, root):
        status, failed = run_tests(test_ids(error, root), root, slow=error.slow)
    if status not in (NO_FAILURE, FAILURES, BROKEN):
        raise CannotPlant(f"pytest ended with exit status {status}: does {', '.join(error.tests)} have a fast test?")
    outcome: Outcome = "missed" if status == NO_FAILURE else "caught"
    return Result(error.name, error.area, outcome, round(time.monotonic() - start, 1), failed)


def run_tests(ids: Sequence[str], root: Path, *, slow: bool, first_only: bool = True) -> tuple[int, str]:
    """pytest's exit status, and the first test that failed; FAILURES for tests that did not end in time."""
    options = [*OPTIONS, "-n", "0" if first_only else "2"]
    options += [] if slow else ["--fast"]
    options += ["-x"] if first_only else []
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *ids],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S if first_only else None)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return FAILURES, f"no end within {LIMIT_S:.0f} s"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not first_only:
        print("\n".join(failed))
    return process.returncode, failed[0].partition(" - ")[0].partition(" ")[2] if failed else ""


@contextmanager
def clones(count: int) -> Iterator[list[Path]]:
    """Scratch checkouts of this one's HEAD, with its environment."""
    with tempfile.TemporaryDirectory(prefix="planted-errors-") as folder:
        found = [Path(folder) / f"clone_{number}" for number in range(count)]
        for clone in found:
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
            if (ROOT / ".venv").exists():
                (clone / ".venv").symlink_to(ROOT / ".venv")
        yield found


def expect_good(errors: Sequence[Planted], root: Path) -> None:
    """Exit unless the tests of all errors pass without one."""
    for slow in (False, True):
        ids = sorted({each for error in errors if error.slow == slow for each in test_ids(error, root)})
        if ids and run_tests(ids, root, slow=slow, first_only=False)[0] != NO_FAILURE:
            sys.exit("planted_errors: error: these tests fail without a planted error; repair them first")


def table(report: Report) -> str:
    """Count how many errors of each area were caught, and name the others."""
    areas = dict.fromkeys(result.area for result in report.results)
    caught = {area: [each.outcome == "caught" for each in report.results if each.area == area] for area in areas}
    lines = [f"{area:<12} {sum(found):>3} of {len(found)}" for area, found in caught.items()]
    lines.append(f"{'in all':<12} {sum(map(sum, caught.values())):>3} of {len(report.results)}")
    lines += [f"missed: {each.name} ({each.area})" for each in report.results if each.outcome == "missed"]
    lines += [f"not planted: {name}: {why}" for name, why in report.not_planted.items()]
    return "\n".join(lines)


def main() -> None:
    """Plant every error that was asked for and has no result yet."""
    start, options = time.monotonic(), _parser().parse_args()
    errors = [error for error in read_errors() if _is_asked(error, options)]
    report = _earlier(options.out, _head())
    report.not_planted = {}
    known = {result.name for result in report.results}
    todo = []
    for error in errors:
        try:
            find(error, ROOT)
            test_ids(error, ROOT)
        except CannotPlant as why:
            report.not_planted[error.name] = str(why)
        else:
            todo += [error] if error.name not in known else []
    print(f"{len(todo)} errors to plant, {len(known)} have a result, {len(report.not_planted)} cannot be planted")
    if todo:
        with clones(WORKERS) as free:
            if not report.passes_without:
                expect_good([error for error in errors if error.name not in report.not_planted], free[0])
                report.passes_without = True
                report.write(options.out)
            _plant_all(todo, free, report, options.out, until=start + 60 * options.minutes)
    report.results.sort(key=lambda result: [error.name for error in read_errors()].index(result.name))
    report.write(options.out)
    print(table(report))


def _plant_all(errors: Sequence[Planted], free: Sequence[Path], report: Report, out: Path, until: float) -> None:
    idle: SimpleQueue[Path] = SimpleQueue()
    for clone in free:
        idle.put(clone)

    def attempt(error: Planted) -> Result | str | None:
        if time.monotonic() > until:
            return None
        clone = idle.get()
        try:
            return try_out(error, clone)
        except CannotPlant as why:
            return str(why)
        finally:
            idle.put(clone)

    with ThreadPoolExecutor(len(free)) as pool:
        for error, found in zip(errors, pool.map(attempt, errors), strict=True):
            if isinstance(found, str):
                report.not_planted[error.name] = found
                print(f"{error.name:<36} not planted: {found}", flush=True)
            elif found is not None:
                report.results.append(found)
                report.write(out)
                print(f"{found.name:<36} {found.outcome:<6} {found.seconds:>6.1f} s  {found.by}", flush=True)


def _is_asked(error: Planted, options: argparse.Namespace) -> bool:
    if options.only:
        return error.name in options.only
    return (options.slow or not error.slow) and (not options.areas or error.area in options.areas.split(","))


def _earlier(path: Path, commit: str) -> Report:
    if not path.exists():
        return Report(commit)
    found = json.loads(path.read_text(encoding="utf-8"))
    results = [Result(**each) for each in found.pop("results")]
    return Report(**found, results=results) if found["commit"] == commit else Report(commit)


def _head() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _tracked(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this error (several times: these)")
    parser.add_argument("--areas", default="", metavar="A,B", help="errors of these areas")
    parser.add_argument("--slow", action="store_true", help="also errors whose tests start processes or take long")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further error after so long (default 60)")
    parser.add_argument(
        "--out", type=Path, default=Path("planted_errors.json"), help="results, which a later run continues"
    )
    return parser


if __name__ == "__main__":
    main()
