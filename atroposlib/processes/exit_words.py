"""Says how a process ended, in the words that logs, errors and docs use. Needs nothing but Python."""

import signal


def exit_words(status: int) -> str:
    """Put an exit status, negative for a signal, into words: `exit status 1`, `killed by signal KILL`."""
    return f"exit status {status}" if status >= 0 else f"killed by signal {signal_name(-status).removeprefix('SIG')}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL; its number if it is one for programs' own use, which have no names."""
    return {each.value: each.name for each in signal.Signals}.get(number, str(number))
