"""Tables that programs write into pages, each between two marks. Called by tests/contract and tests/releases."""

from collections.abc import Iterable, Sequence


def with_table(page: str, begin: str, end: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The page with this table between its marks."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no table between {begin!r} and {end!r}: write both lines into it")
    lines = ["", _row(head), "|---" * len(head) + "|", *map(_row, rows), "", ""]
    return f"{before}{begin}\n" + "\n".join(lines) + f"{end}{after}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
