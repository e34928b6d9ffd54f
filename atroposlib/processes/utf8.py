"""Programs read and write UTF-8, whatever the locale says: under the C locale, Python would take paths, arguments and
its own output as ASCII.
"""

import os
import sys


def restart_in_utf8() -> None:
    """Become the same program in Python's UTF-8 mode, which its children inherit, unless it is in it already. Call it
    first of all, in a program's own process.
    """
    if sys.getfilesystemencoding().lower() in ("utf-8", "utf8"):
        return
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, os.environ | {"PYTHONUTF8": "1"})
