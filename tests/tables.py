"""Tables that programs write into pages, each between two marks. Called by tests/contract and tests/releases."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby


def with_table(page: str, begin: str, end: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The page with this table between its marks. Neighbours that differ in their first cell alone are one row."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no table between {begin!r} and {end!r}: write both lines into it")
    lines = ["", _row(head), "|---" * len(head) + "|", *map(_row, _merged(rows)), "", ""]
    return f"{before}{begin}\n" + "\n".join(lines) + f"{end}{after}"


def _merged(rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    for cells, alike in groupby(rows, lambda row: list(row[1:])):
        yield [", ".join(row[0] for row in alike), *cells]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
