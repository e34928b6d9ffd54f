"""What people read, a table, and what they attach to an issue, sampler-receipt.json."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from atroposlib.files import write_whole
from sampler_doctor.rows.session import Result

RESULT_WIDTH, NAME_WIDTH = 11, 25


@dataclass(frozen=True)
class Row:
    """One line of the table; `after` is the update behind which it was measured, `seconds` what it took."""

    name: str
    result: Result
    figure: str
    limit: str
    means: str
    remedy: str
    after: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        limit = f" (limit {self.limit})" if self.limit else ""
        line = f"{self.result:<{RESULT_WIDTH}} {self.name:<{NAME_WIDTH}} {self.figure}{limit}"
        if self.result != "fails":
            return line
        pad = " " * (RESULT_WIDTH + 1)
        return f"{line}\n{pad}means: {self.means}\n{pad}do:    {self.remedy}"


def summary(rows: Sequence[Row], seconds: float) -> str:
    """Return the last line of the table."""
    counts = Counter(row.result for row in rows)
    told = ", ".join(f"{counts[result]} {result}" for result in ("ok", "fails", "not offered", "not shown"))
    return f"{len(rows)} rows: {told}; {seconds:.0f} s"


def write_receipt(path: Path, versions: Mapping[str, object], rows: Sequence[Row], seconds: float) -> None:
    """Write versions and rows as JSON. The server's address is not in it."""
    content = {**versions, "seconds": round(seconds, 3), "rows": [asdict(row) for row in rows]}
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
