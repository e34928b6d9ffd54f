"""Environment servers, one per file; each runs alone. A wheel installs this package as `atropos_environments`.

Directories `environments/` elsewhere on the path, such as that of a checkout of the archived ancestor, belong to the
same package, in the order of the path: its environments import each other as `environments.NAME`.
"""

from pathlib import Path
from pkgutil import extend_path

_OWN = str(Path(__file__).parent)
_everywhere: list[str] = list(extend_path([], __name__))
__path__ = _everywhere if _OWN in _everywhere else [_OWN, *_everywhere]
