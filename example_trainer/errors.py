"""Errors that end a training run with a line for the person who started it, instead of a traceback."""

from atroposlib.errors import AtroposError


class TrainerError(AtroposError):
    """Is raised with what failed, with which value, and what to do about it."""


class ModelError(TrainerError):
    """A model that cannot be loaded or trained."""


class BadBatch(TrainerError):
    """A batch whose gradient cannot be used; the weights are as before."""
