"""Tokenizers small enough to make in a test: byte-level BPE with ChatML, as transformers would load one from a model
directory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As reasoning models do it: the thoughts of earlier assistant turns are dropped.
THINK_DROPPING_CHATML = CHATML.replace(
    "message['content']",
    "(message['content'] if loop.last or message['role'] != 'assistant'"
    " else message['content'].split('</think>')[-1].lstrip('\n'))",
)


def make_tiny_tokenizer(merges: Sequence[tuple[str, str]] = (), chat_template: str = CHATML) -> Any:
    """A PreTrainedTokenizerFast of 256 bytes, one token per merge, and the two ChatML tokens.

    Each of `merges` joins two tokens that exist by then, e.g. ("a", "b") and then ("ab", "c"); a space is written as
    "Ġ". The end-of-sequence token is <|im_end|>; there is no BOS.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=IM_END, additional_special_tokens=[IM_START]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = (), chat_template: str = CHATML) -> Path:
    """Write a tiny tokenizer to `folder`, to be loaded by name as a model's; returns `folder`."""
    make_tiny_tokenizer(merges, chat_template).save_pretrained(folder)
    return folder
