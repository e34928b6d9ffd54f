"""`python -m atroposlib.frontend.jsonl2html IN.jsonl [OUT.html]`: a page out of a file of groups. See
`atroposlib.envs.files.html_report`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from atroposlib.envs.files.html_report import group_html, page_beside, write_html
from atroposlib.errors import one_line_errors


def create_html_for_group(group: Mapping[str, object], index: int) -> str:
    """One group as HTML; an empty text when it has no messages."""
    return group_html(group, index) if group.get("messages") and group.get("scores") else ""


def generate_html(input_path: str, output_path: str | None = None) -> Path:
    """Write the page of `input_path`, beside it unless told where, and return its path. Raises OSError, or ValueError
    naming the line.
    """
    page = Path(output_path) if output_path else page_beside(Path(input_path))
    if page.suffix not in (".html", ".htm"):  # such as the second file of *.jsonl
        raise ValueError(f"{page} would be replaced by the page: give one file to read, and a name that ends in .html")
    write_html(Path(input_path), page)
    return page


def main() -> None:
    """Command line."""
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit("usage: python -m atroposlib.frontend.jsonl2html IN.jsonl [OUT.html]")
    with one_line_errors("jsonl2html", OSError, ValueError):
        print(generate_html(*sys.argv[1:]))


if __name__ == "__main__":
    main()
