"""Tokenizers for environments: loaded without torch, and returning plain lists.

transformers 5 makes `apply_chat_template` return a BatchEncoding by default, and its AutoTokenizer imports torch
wherever torch is installed. Environments take `len()` of a templated prompt and must stay light, so tokenizers are
loaded here.
"""

import functools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from atroposlib.logs import get_logger

log = get_logger(__name__)

TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
    "config.json",
]


# For an import below this module, see old_paths.py.
__path__: list[str] = []


class Tokenizer(Protocol):
    """The three methods that this library asks of a tokenizer; any Hugging Face tokenizer has them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


NO_TOKENIZER = "none"


class NoTokenizer:
    """Stands in where none is needed: an evaluation by a server of text."""

    all_special_tokens: tuple[str, ...] = ()

    def get_added_vocab(self) -> dict[str, int]:
        """No tokens."""
        return {}

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(f"this needs a tokenizer ({name}): name one with --env.tokenizer_name")


# Requests ask from threads: one loads, the others wait for it. Also, transformers' lazy imports fail when threads race
# for them.
LOADING = threading.Lock()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a local directory or a hub model; the same object for the same name. Raises OSError naming
    `name`.
    """
    if name == NO_TOKENIZER:
        return NoTokenizer()
    with LOADING:
        return _load(name)


@functools.lru_cache(maxsize=8)
def _load(name: str) -> Any:
    start = time.monotonic()
    log.info("Loading the tokenizer of %s", name)
    folder = _local_folder(name)
    tokenizer: Any
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        from transformers import AutoTokenizer  # which imports torch if it is installed

        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    log.info("Loaded the tokenizer of %s in %.1f s", name, time.monotonic() - start)
    return tokenizer


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Any], **kwargs: Any) -> list[int]:
    """Token ids of the templated `messages`, under any version of transformers and any tokenizer."""
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs))


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of raw prompt text with the special tokens that the tokenizer adds, but not a second BOS after one in
    the text.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True)
    doubled = len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
    return ids[1:] if doubled else ids


def _local_folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        raise OSError(
            f"no tokenizer for {name!r}: neither a local directory nor a model on the hub; set tokenizer_name to one "
            "of these"
        ) from error
