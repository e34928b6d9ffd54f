"""Tokenizers for environments: loaded without torch, and returning plain lists.

transformers 5 makes `apply_chat_template` return a BatchEncoding by default, and its AutoTokenizer imports torch
wherever torch is installed. Environments take `len()` of a templated prompt and must stay light, so tokenizers are
loaded here.
"""

import functools
import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from atroposlib.errors import reading
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


PLAIN_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend"}
PLAIN_CLASSES |= {"MistralCommonBackend"}  # reads tekken.json, and is not chosen without it
# What tokenizers treat in different ways: blanks at both ends and in rows, line ends, digits, marks, other scripts,
# an emoji of several code points, control characters, and the words of templates.
PROBES = (
    "What is 2 + 2?",
    " two  blanks   and\ttabs ",
    "line\nends\n\nand\r\n more\n",
    "123456789 3.14 1,234",
    "[INST] <<SYS>>be kind<</SYS>> [/INST] user\nassistant\n",
    "don't can't I'll \"quoted\" (x_1) {y} <z> $5",
    "Größe naïve résumé ﬁ １２ ½",
    "你好，世界 こんにちは Привет мир مرحبا",
    "👩\u200d👩\u200d👧 \u00a0\u3000\u200b\ufeff",
    "<think>\nhm\n</think>\n\n<tool_call>{}</tool_call>",
)

# For an import below this module, see old_paths.py.
__path__: list[str] = []


class Tokenizer(Protocol):
    """The three methods that this library asks of a tokenizer; any Hugging Face tokenizer has them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: object, **kwargs: object) -> Any: ...


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
def _load(name: str) -> object:
    start = time.monotonic()
    log.info("Loading the tokenizer of %s", name)
    folder, remedy = _local_folder(name), "name another (--env.tokenizer_name, of other programs --tokenizer)"
    with reading(f"no tokenizer can be made of {name!r}", OSError, remedy=remedy):
        tokenizer = _read(folder)
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    log.info("Loaded the tokenizer of %s in %.1f s", name, time.monotonic() - start)
    return tokenizer


def _read(folder: Path) -> Any:
    """The tokenizer that AutoTokenizer makes of `folder`, which is what vLLM and a model's users load.

    AutoTokenizer imports torch, for seconds and 270 MB. It makes either the plain class, which is what tokenizer.json
    says, or one that may overrule tokenizer.json: the class that tokenizer_config.json names, or that of the model's
    type. Where all of these read alike, there is nothing to choose, and torch stays out.
    """
    if (folder / "tokenizer.json").is_file() and not (folder / "tekken.json").is_file():
        from transformers import PreTrainedTokenizerFast

        plain = PreTrainedTokenizerFast.from_pretrained(folder)
        if all(_read_alike(plain, each.from_pretrained(folder)) for each in _other_classes(folder)):
            return plain
        log.info("The tokenizer's class overrules tokenizer.json: loading it by AutoTokenizer, as vLLM does")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _other_classes(folder: Path) -> list[Any]:
    """The classes of transformers that AutoTokenizer may choose for `folder`, besides the plain one."""
    import transformers

    names = {
        _value(folder / "tokenizer_config.json", "tokenizer_class"),
        _value(folder / "config.json", "tokenizer_class"),
    }
    if (model_type := _value(folder / "config.json", "model_type")) is not None:
        # its table, read as text: to import it is to import torch
        table = Path(transformers.__file__).with_name("models") / "auto" / "tokenization_auto.py"
        names |= set(re.findall(rf'\(\s*"{re.escape(model_type)}",\s*"(\w+)"', table.read_text(encoding="utf-8")))
    known: list[Any] = [getattr(transformers, name.removesuffix("Fast"), None) for name in sorted(filter(None, names))]
    return [each for each in known if each is not None and each.__name__ not in PLAIN_CLASSES]


def _value(path: Path, key: str) -> str | None:
    """The text by `key` in a JSON file; None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get(key)
    except FileNotFoundError:
        return None
    return value if isinstance(value, str) else None


def _read_alike(first: Any, second: Any) -> bool:
    """Return whether two tokenizers make the same ids and text of `PROBES`, alone and behind a special token."""
    probes = [*PROBES, *(f"{first.eos_token}{probe}" for probe in PROBES if first.eos_token)]
    return first.get_vocab() == second.get_vocab() and all(
        (ids := first.encode(probe, add_special_tokens=special)) == second.encode(probe, add_special_tokens=special)
        and first.decode(ids) == second.decode(ids)
        for probe in probes
        for special in (False, True)
    )


def encode_within(tokenizer: Tokenizer, text: str, before: int | None = None) -> list[int]:
    """Token ids of `text` inside of a longer text: as they stand behind the special token `before`, or behind any.

    A tokenizer of SentencePiece's kind puts a word mark before the first piece of a whole text, and of no other.
    """
    if not text:
        return []
    if before is None:
        before = _neutral_token(tokenizer)
    if before is not None:
        ids: list[int] = tokenizer.encode(tokenizer.decode([before]) + text, add_special_tokens=False)
        if ids[:1] == [before]:
            return ids[1:]
    return list(tokenizer.encode(text, add_special_tokens=False))


def _neutral_token(tokenizer: Tokenizer) -> int | None:
    """A special token that takes no blanks from the text behind it; None if there is none."""
    known = getattr(tokenizer, "added_tokens_decoder", {})
    return next((token for token, added in known.items() if added.special and not added.rstrip), None)


def chat_ids(tokenizer: Tokenizer, messages: Sequence[object], **kwargs: object) -> list[int]:
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
            f"no tokenizer for {name!r}: neither a local directory nor a model on the hub; set tokenizer_name "
            "(--env.tokenizer_name, of other programs --tokenizer) to one of these"
        ) from error
