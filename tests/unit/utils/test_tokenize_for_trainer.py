"""Tokens and masks of finished conversations, and tokenizers that return lists without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.testing.tiny_tokenizer import THINK_DROPPING_CHATML, make_tiny_tokenizer, save_tiny_tokenizer
from atroposlib.type_definitions import Message
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tokenizers import encode_prompt, load_tokenizer

TOKENIZER = make_tiny_tokenizer()
CHAT: list[Message] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
TEXT = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CHAT)


def trained_text(result: dict[str, Any]) -> str:
    return str(TOKENIZER.decode([token for token in result["masks"] if token != -100]))


def test_the_last_reply_is_trained_and_all_is_plain_lists() -> None:
    result = tokenize_for_trainer(TOKENIZER, CHAT)
    assert result.keys() == {"tokens", "masks"}
    assert type(result["tokens"]) is list
    assert {type(token) for token in result["tokens"]} == {int}
    assert TOKENIZER.decode(result["tokens"]) == TEXT
    assert trained_text(result) == "a2<|im_end|>\n"
    assert all(mask in (-100, token) for mask, token in zip(result["masks"], result["tokens"], strict=True))


def test_all_assistant_turns_are_trained_on_request() -> None:
    assert trained_text(tokenize_for_trainer(TOKENIZER, CHAT, False, True)) == "a1<|im_end|>\na2<|im_end|>\n"


@pytest.mark.parametrize("answer", ["a1", "<think>\nhm\n</think>\n\na1"])
@pytest.mark.parametrize("opens", ["", "<think>\n\n</think>\n\n"])
def test_a_turn_that_the_template_shortens_once_others_follow_is_trained_as_far_as_it_stands(
    answer: str, opens: str
) -> None:
    """Templates drop the thoughts of earlier turns, or open the last turn alone with empty ones."""
    template = THINK_DROPPING_CHATML.replace(
        "(message['content'] if loop.last", f"({opens!r} + message['content'] if loop.last"
    )
    tokenizer = make_tiny_tokenizer(chat_template=template)
    chat: list[Message] = [*CHAT[:2], {"role": "assistant", "content": answer}, *CHAT[3:]]
    result = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True)
    assert trained_text(result) == f"a1<|im_end|>\n{opens}a2<|im_end|>\n"
    result = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True, first_turn=3)
    assert trained_text(result) == f"{opens}a2<|im_end|>\n"


@pytest.mark.parametrize("system", ["", "<|im_start|>system\nYou help.<|im_end|>\n"])
def test_of_a_chat_that_the_model_begins_its_words_alone_are_trained(system: str) -> None:
    """Neither the header nor the system prompt that a template adds."""
    tokenizer = make_tiny_tokenizer(chat_template=repr(system).join(("{{ ", " }}")) + str(TOKENIZER.chat_template))
    chat: list[Message] = CHAT[2:]
    result = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True)
    assert TOKENIZER.decode(result["tokens"]).startswith(f"{system}<|im_start|>assistant\na1")
    assert trained_text(result) == "a1<|im_end|>\na2<|im_end|>\n"


def test_messages_come_along_on_request() -> None:
    assert tokenize_for_trainer(TOKENIZER, CHAT, include_messages=True)["messages"] == CHAT


@pytest.mark.parametrize("all_turns", [False, True])
def test_a_reply_that_was_cut_has_no_end_of_sequence(all_turns: bool) -> None:
    result = tokenize_for_trainer(TOKENIZER, CHAT, train_on_all_assistant_turns=all_turns, finish_reason="length")
    assert TOKENIZER.decode(result["tokens"]) == TEXT.removesuffix("<|im_end|>\n")
    assert len(result["tokens"]) == len(result["masks"])
    assert trained_text(result).endswith("a2")


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        tokenize_for_trainer(TOKENIZER, [])


def test_a_loaded_tokenizer_templates_to_a_list_and_to_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tiny_tokenizer(tmp_path)))
    templated = tokenizer.apply_chat_template(CHAT)
    assert type(templated) is list
    assert len(templated) == len(tokenizer.encode(TEXT))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == TEXT
    assert load_tokenizer(str(tmp_path)) is tokenizer


def test_a_missing_tokenizer_is_named() -> None:
    with pytest.raises(OSError, match=r"no tokenizer for '/no/such/folder'.*set tokenizer_name .*--tokenizer"):
        load_tokenizer("/no/such/folder")


def test_a_bos_in_the_text_is_not_doubled() -> None:
    class WithBos:
        bos_token_id = 1

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [1 if letter == "^" else 2 for letter in text]

    assert encode_prompt(WithBos(), "^a") == [1, 2]
    assert encode_prompt(WithBos(), "a^") == [1, 2, 1]


@pytest.mark.services
def test_clients_and_tokenizers_run_without_torch_and_vllm(tmp_path: Path) -> None:
    """In a process where both are installed, using these modules must load neither."""
    save_tiny_tokenizer(tmp_path)
    script = f"""
import sys
import atroposlib.envs.server_handling.server_manager, atroposlib.testing.fake_inference_server
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tokenizers import load_tokenizer
tokenize_for_trainer(load_tokenizer({str(tmp_path)!r}), [{{"role": "user", "content": "hi"}}])
sys.exit(", ".join({{"torch", "vllm"}} & sys.modules.keys()) or 0)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.services
def test_threads_that_ask_at_once_get_one_tokenizer(tmp_path: Path) -> None:
    folder = str(save_tiny_tokenizer(tmp_path))
    code = f"""
from concurrent.futures import ThreadPoolExecutor
from atroposlib.utils.tokenizers import load_tokenizer
with ThreadPoolExecutor(8) as pool:
    print(len({{id(tokenizer) for tokenizer in pool.map(load_tokenizer, [{folder!r}] * 8)}}))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.stdout == "1\n", ended.stderr
