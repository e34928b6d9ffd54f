"""The errors that people read: one line with the value, the limit and the remedy, and no traceback.

Code raises a subclass of `AtroposError`, and everything between that code and `main` lets it pass. What a library
raises becomes such a line where the cause is still known, by one of three context managers:

    with reaching(url, PeerError, remedy="start the API with `run-api`", also=(httpx.HTTPError,), limit_s=30):
        reply = client.get(url, timeout=30)
    with reading(f"cannot read problems from {path}", DataError):
        problems = msgspec.json.decode(path.read_bytes())
    with loading("wandb", TrainerError, remedy="pip install wandb, or --use-wandb false"):
        import wandb

Every `main` runs inside `one_line_errors`, which prints the line and exits.
"""

import errno
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

from atroposlib.logs import drop_output, flush_output, print_error, put
from atroposlib.stderr_lines import plain_stderr

# The exit status of a command that must be asked for otherwise; a launcher does not start such a service again.
WRONG_USE = 2
SHOWN = 80  # characters of a path that is too long
TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a disk
NOT_COMPARED = 2  # the exit status of a command whose 1 means "they differ", if it could not compare
MakeError = Callable[[str], Exception]  # an error class, or a function that makes an error of a line


class AtroposError(RuntimeError):
    """Nothing is wrong in the code: the message names the value, the limit and the remedy, in one line."""

    exit_status: ClassVar[int] = 1


def reaching(
    peer: str,
    raises: MakeError,
    *,
    remedy: str = "",
    also: tuple[type[Exception], ...] = (),
    limit_s: float | None = None,
) -> AbstractContextManager[None]:
    """Ask another process. An OSError (no connection, a timeout), a reply that cannot be decoded (ValueError), or an
    error of the HTTP library (`also`) becomes `raises("PEER: REASON; REMEDY")`. `limit_s` is the timeout of the
    request, for the reason of a timeout.
    """
    return _as_one_line(peer, raises, remedy, (OSError, ValueError, *also), limit_s)


def reading(
    what: str, raises: MakeError, *, remedy: str = "", also: tuple[type[Exception], ...] = ()
) -> AbstractContextManager[None]:
    """Read a file, or write one. An OSError, content that cannot be decoded (ValueError, RecursionError, EOFError), or
    an error of the format's library (`also`) becomes `raises("WHAT: REASON; REMEDY")`.
    """
    return _as_one_line(what, raises, remedy, (OSError, ValueError, RecursionError, EOFError, *also))


def loading(library: str, raises: MakeError, *, remedy: str = "") -> AbstractContextManager[None]:
    """Import a library, or let it load what only it can. An ImportError, OSError, RuntimeError, ValueError or KeyError
    (a release that differs) becomes `raises("LIBRARY: REASON; REMEDY")`.
    """
    return _as_one_line(library, raises, remedy, (ImportError, OSError, RuntimeError, ValueError, KeyError))


@contextmanager
def one_line_errors(prog: str, *also: type[Exception], exit_status: int | None = None) -> Iterator[None]:
    """Guard the body of a `main`: print an AtroposError (or one of `also`) as `PROG: error: LINE` and end the process
    with the error's exit status, or with `exit_status`; so does a path that is too long, with 2, a disk that takes no
    more, with 1, and Ctrl-C with 130. A reader of the output that has gone ends it with 141, without a word, as it ends
    other programs.
    """
    kinds: tuple[type[Exception], ...] = (AtroposError, *also)
    caught: tuple[type[Exception], ...] = (*kinds, OSError)
    try:
        try:
            yield
        finally:
            flush_output()
    except caught as error:
        raise SystemExit(_told(prog, error, kinds, exit_status)) from None
    except KeyboardInterrupt:
        put(f"{prog}: interrupted", plain_stderr())
        raise SystemExit(130) from None


def _told(prog: str, error: Exception, kinds: tuple[type[Exception], ...], exit_status: int | None) -> int:
    """Print the line of an error, and return the exit status. Raises the error if it is a fault of the code."""
    if isinstance(error, BrokenPipeError) and _is_unread():
        return 128 + signal.SIGPIPE
    drop_output()
    own = error.exit_status if isinstance(error, AtroposError) else 1
    line: object = error
    if not isinstance(error, kinds):
        assert isinstance(error, OSError)
        if error.errno == errno.ENAMETOOLONG:  # a path that somebody gave; it may be looked for anywhere
            print_error(prog, f"{str(error.filename)[:SHOWN]}...: {error.strerror}; give a shorter one")
            return WRONG_USE
        if error.errno not in TAKES_NO_MORE:
            raise error
        line = f"cannot write {error.filename or 'the output'}: {error.strerror}; free space"
    print_error(prog, line)
    return own if exit_status is None else exit_status


def _is_unread() -> bool:
    """Return whether the reader of stdout has gone, as `| head -1` does: nothing is wrong, and nobody to tell."""
    try:
        pipe = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # it is no file
        return False
    poll = select.poll()
    poll.register(pipe, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    drop_output()
    return True


def reason(error: BaseException, limit_s: float | None = None) -> str:
    """Give the reason in one line: what the operating system says, the first line of the error's text, or its name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TimeoutError) and limit_s is not None:
        return f"no reply within {limit_s:g} s"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _as_one_line(
    what: str,
    raises: MakeError,
    remedy: str,
    kinds: tuple[type[Exception], ...],
    limit_s: float | None = None,
) -> Iterator[None]:
    try:
        yield
    except AtroposError:  # it has its line already, and a better one
        raise
    except kinds as error:
        raise raises(f"{what}: {reason(error, limit_s)}" + (f"; {remedy}" if remedy else "")) from error
