"""A model of the hub, before a run needs it: its config.json, by which the plan knows its size and context.

name ──▶ cache? ──▶ hub ──▶ cache, which example_trainer.memory.model_size reads
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from atroposlib.flags import ConfigError
from example_trainer.memory.model_size import config_file

ASK_S = 10
_asks = ContextVar("asks", default=True)


@contextmanager
def by_name_alone() -> Iterator[None]:
    """Ask no hub for the models of plans that are made meanwhile."""
    token = _asks.set(False)
    try:
        yield
    finally:
        _asks.reset(token)


def expect_model(model: str, flag: str) -> None:
    """Bring config.json of a hub's model into the cache, unless it is there. The plan goes by the model's name where
    the hub does not answer. Raises ConfigError for a model that the hub does not give.
    """
    if _asks.get():
        _bring(model, flag)


@cache
def _bring(model: str, flag: str) -> None:
    import httpx
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ConfigError(f"{flag} {model} is neither a model's directory nor an id of the hub, OWNER/NAME") from error
    if constants.HF_HUB_OFFLINE or config_file(model) is not None:
        return
    hub, login = constants.ENDPOINT, "log in with `hf auth login` or HF_TOKEN"
    print(f"Asking {hub} for the config.json of {model}, for at most {ASK_S} s", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        httpx.head(hub, timeout=ASK_S)  # the hub's library asks one that is not there six times, over half a minute
        hf_hub_download(model, "config.json", etag_timeout=ASK_S)
    except GatedRepoError as error:
        raise ConfigError(f"{flag} {model} needs a licence: accept it at {hub}/{model}, and {login}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{flag} {model} is neither a directory here nor a model at {hub}: check the name; for a private model,"
            f" {login}"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise ConfigError(f"{flag} {model} has no config.json at {hub}: give a model for transformers") from error
    except (OSError, httpx.HTTPError, ImportError) as error:  # of a SOCKS proxy
        why = str(error).partition("\n")[0]
        print(f"The plan goes by the name of {model}, for the hub does not answer: {why}", file=sys.stderr, flush=True)
    else:
        print(f"It came after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
