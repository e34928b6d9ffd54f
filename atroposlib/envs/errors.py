"""Errors that end an environment server with one line instead of a traceback: nothing in its code is wrong."""

from atroposlib.errors import AtroposError


class EnvError(AtroposError):
    """The environment cannot continue; the message names the value, the limit and the remedy."""


class PeerError(EnvError):
    """A peer did not become ready in time, or refused; the message says what to do."""


class GroupTooLargeError(EnvError, ValueError):
    """A group does not fit in the trainer's batch."""


class ProcessError(EnvError):
    """`process` could make no group."""


class DataError(EnvError):
    """Problems to sample for are missing, unreadable or malformed."""


class NoTokenIds(EnvError, NotImplementedError):
    """Tokens to train on were to be sampled from a server that gives none."""


class NoChatTemplate(EnvError):
    """A conversation was to be rendered by a tokenizer that has no chat template."""


class OtherTokenizer(EnvError):
    """The inference server makes other ids of a text than the environment's tokenizer."""


class NotReplayed(EnvError, ValueError):
    """Tokens to train on were to be sampled with a parameter that the trainer does not replay."""


class Unscored(Exception):
    """An answer could not be scored, through no fault of the environment's code: its group is dropped and counted,
    in the metrics as `count`.
    """

    def __init__(self, reason: str = "", count: str = "groups_unscored") -> None:
        super().__init__(reason)
        self.count = count


class RecordError(EnvError):
    """A file that the environment writes cannot be written."""
