"""Errors that end an environment server with one line instead of a traceback: nothing in its code is wrong."""

from atroposlib.errors import WRONG_USE, AtroposError


class EnvError(AtroposError):
    """The environment cannot continue; the message names the value, the limit and the remedy."""


class WrongSetting(EnvError):
    """A setting must change before the environment can run, so a launcher does not start it again."""

    exit_status = WRONG_USE


class PeerError(EnvError):
    """A peer did not become ready in time, or refused; the message says what to do."""


class GroupTooLargeError(WrongSetting, ValueError):
    """A group does not fit in the trainer's batch."""


class ProcessError(EnvError):
    """`process` could make no group."""


class DataError(EnvError):
    """Problems to sample for are missing, unreadable or malformed."""


class NoTokenIds(WrongSetting, NotImplementedError):
    """Tokens to train on were to be sampled from a server that gives none."""


class NoChatTemplate(WrongSetting):
    """A conversation was to be rendered by a tokenizer that has no chat template."""


class OtherTokenizer(WrongSetting):
    """The inference server makes other ids of a text than the environment's tokenizer."""


class NotReplayed(WrongSetting, ValueError):
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
