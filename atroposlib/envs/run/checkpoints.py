"""An environment's own checkpoints: `CHECKPOINT_DIR/env_checkpoints/NAME/step-N.json`, each an object of attributes to
set again.

Each is written atomically. A damaged one is skipped in favour of the one before it, with a log line.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from atroposlib.files import write_whole
from atroposlib.logs import get_logger
from atroposlib.row_files.json_text import encode

KEPT = 16  # newest ones of a name; a trainer keeps 2 of its own by default

log = get_logger(__name__)


def save(checkpoint_dir: str, name: str, step: int, attributes: Mapping[str, object]) -> None:
    """Write the checkpoint of `step`, and keep KEPT of those up to it. Later ones are another run's, or of steps that
    are made again. Raises OSError, TypeError.
    """
    folder = _root(checkpoint_dir) / name
    write_whole(
        folder / f"step-{step}.json",
        encode(attributes, any_keys=True),
    )
    up_to_now = [path for saved, path in _newest_first(folder) if saved <= step]
    for path in up_to_now[KEPT:]:
        path.unlink(missing_ok=True)


def load(checkpoint_dir: str, name: str, display_name: str, step: int) -> tuple[Path, dict[str, object]] | None:
    """The newest whole checkpoint at or before `step`, of `name` or of the name with another number, which a restart
    gets; of equally new ones that of `name`.
    """
    own, plain = _root(checkpoint_dir) / name, _root(checkpoint_dir) / display_name
    # by no pattern: a name may have brackets, and begin as another one does
    numbered = [folder for folder in sorted(plain.parent.glob("*")) if _is_numbered(folder.name, plain.name)]
    found = [each for folder in dict.fromkeys([own, *numbered]) for each in _newest_first(folder) if each[0] <= step]
    for _, path in sorted(found, key=lambda each: each[0], reverse=True):
        try:
            attributes = msgspec.json.decode(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            log.warning("Skipping the checkpoint %s, which is damaged (%s)", path, error)
            continue
        if isinstance(attributes, dict):
            return path, attributes
        log.warning("Skipping the checkpoint %s, which is damaged (it is not a JSON object)", path)
    return None


def _is_numbered(name: str, display_name: str) -> bool:
    start, _, number = name.rpartition("_")
    return start == display_name and number.isdecimal()


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    steps = ((path.stem.removeprefix("step-"), path) for path in folder.glob("step-*.json"))
    return sorted(((int(step), path) for step, path in steps if step.isascii() and step.isdecimal()), reverse=True)


def _root(checkpoint_dir: str) -> Path:
    return Path(checkpoint_dir) / "env_checkpoints"
