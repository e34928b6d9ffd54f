"""The settings in which runs differ, for the page that compares them."""

import re
from collections.abc import Sequence

from atroposlib.view.run_data.run_files import RunFiles

# Settings that say where a run was, and not what it was.
PLACES = re.compile(
    r"(^|[._])(ports?|host|hosts_file|urls?|paths?|dir|directory|file|addr|api_key|token)$|_path_|^commit$"
)


def differences(runs: Sequence[RunFiles]) -> tuple[list[dict[str, object]], int]:
    """Return the settings that differ, each with one value per run, null where a run has none, and whether that is its
    default; and how many settings were compared. What no run chose is not compared.
    """
    chosen, resolved = [run.settings() for run in runs], [run.resolved_settings() for run in runs]
    names = sorted({name for settings in chosen for name in settings if not PLACES.search(name)})
    found: list[dict[str, object]] = []
    for name in names:
        values = [settings.get(name) for settings in resolved]
        if any(value != values[0] for value in values):
            defaults = [name not in settings and name in all_ for settings, all_ in zip(chosen, resolved, strict=True)]
            found.append({"name": name, "values": values, "defaults": defaults})
    return found, len(names)
