"""The runs that a window shows, by label. A run is looked up in a dict, so no request names a path."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from atroposlib.files import is_open
from atroposlib.view.run_data.group_files import GroupFiles
from atroposlib.view.run_data.jsonl_index import Indexer
from atroposlib.view.run_data.run_files import RunFiles

MAX_RUNS = 1000  # of a directory of runs
MAX_ROWS = 2_500_000  # in all indexes together, at most 67 bytes each


class Run:
    """A run directory with the indexes of its files."""

    def __init__(self, files: RunFiles, indexer: Indexer) -> None:
        self.files = files
        self.groups = GroupFiles(files, indexer)


class Runs:
    """`paths` are run directories. `parent` is a directory of runs, whose entries may come and go. Without
    `keep_notes`, as for directories that are removed at the end, nobody can write notes of them.
    """

    def __init__(self, paths: Sequence[Path], parent: Path | None = None, keep_notes: bool = True) -> None:
        self.keep_notes = keep_notes
        self._paths, self._parent = [path.resolve() for path in paths], parent
        self._indexer = Indexer()
        self._runs: dict[Path, Run] = {}
        self._used: list[Path] = []
        self._lock = threading.Lock()

    def all(self) -> dict[str, Run]:
        """Every run by its label: the directory's name, with its parent where two have the same."""
        paths = list(dict.fromkeys([*self._paths, *self._found()]))
        with self._lock:
            for path in paths:
                if path not in self._runs:
                    self._runs[path] = Run(RunFiles(path, path.name), self._indexer)
            for gone in self._runs.keys() - set(paths):
                self._runs.pop(gone).groups.forget()
            labelled: dict[str, Run] = {}
            for path in paths:
                label, number = path.name, 1
                if any(other.name == label and other != path for other in paths):
                    label = f"{path.name} ({path.parent.name})"
                while label in labelled:
                    number += 1
                    label = f"{path.name} ({path.parent.name} {number})"
                self._runs[path].files.label = label
                labelled[label] = self._runs[path]
            return labelled

    def get(self, label: str) -> Run | None:
        """The run with this label."""
        return self.all().get(label)

    def use(self, run: Run) -> None:
        """Keep this run's indexes, and let those of runs that nobody looks at go when there are too many rows."""
        with self._lock:
            path = run.files.path
            self._used = [*(each for each in self._used if each != path), path]
            while len(self._used) > 1 and sum(each.groups.rows for each in self._runs.values()) > MAX_ROWS:
                oldest = self._runs.get(self._used.pop(0))
                if oldest is not None:
                    oldest.groups.forget()

    def _found(self) -> Iterator[Path]:
        """Directories of the directory of runs, newest first. Left out are names with control characters, and those
        that this user may not read.
        """
        if self._parent is None:
            return
        entries = []
        with suppress(OSError):
            for entry in self._parent.iterdir():
                with suppress(OSError):
                    is_run = entry.name.isprintable() and not entry.name.startswith(".") and entry.is_dir()
                    if is_run and is_open(entry):
                        entries.append((entry.stat().st_mtime, entry))
        for _, entry in sorted(entries, reverse=True)[:MAX_RUNS]:
            if not entry.is_symlink():
                yield entry
