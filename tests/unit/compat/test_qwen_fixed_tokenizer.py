"""`QwenFixedTokenizer`, under the path that users of 0.4.0 import."""

from pathlib import Path
from typing import Any

import pytest

from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.tokenizers.qwen_fixed_tokenizer import (  # an old path
    QwenFixedTokenizer,
)

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, {"name": "add", "arguments": '{"a": 2}'}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def tokenizer(folder: Path, template: str | None) -> Any:
    path = save_tiny_tokenizer(folder)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    own = load_tokenizer(str(path))
    own.chat_template = template
    own.save_pretrained(path)
    load_tokenizer.__globals__["_load"].cache_clear()
    return QwenFixedTokenizer(str(path))


APPENDS = "{% set l = [] %}{% for m in messages %}{% set _ = l.append(m.content) %}{% endfor %}{{ l | join(' ') }}"


@pytest.mark.parametrize("template", [None, APPENDS], ids=["missing", "appends"])
def test_a_template_that_cannot_be_rendered_is_replaced(tmp_path: Path, template: str | None) -> None:
    fixed = tokenizer(tmp_path / "t", template)
    assert fixed.apply_chat_template(CHAT, tokenize=False) == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 2.<|im_end|>\n"
    )
    asked = fixed.apply_chat_template([SYSTEM, CHAT[0]], tokenize=False, add_generation_prompt=True)
    assert asked == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_listed_in_the_system_message_with_and_without_one_of_the_user_s(tmp_path: Path) -> None:
    fixed = tokenizer(tmp_path / "t", None)
    with_own = fixed.apply_chat_template([SYSTEM, CHAT[0]], tools=TOOLS, tokenize=False)
    without = fixed.apply_chat_template([CHAT[0]], tools=TOOLS, tokenize=False)
    assert with_own.startswith("<|im_start|>system\nBe brief.\n\n")
    assert with_own.replace("Be brief.\n\n", "") == without
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in without
    assert without.count("<|im_start|>system") == 1


def test_a_template_that_works_stays_and_the_shared_tokenizer_is_untouched(tmp_path: Path) -> None:
    kept = tokenizer(tmp_path / "kept", "{{ messages[0].content }}!")
    assert kept.apply_chat_template(CHAT[:1], tokenize=False) == "1 + 1?!"
    fixed = tokenizer(tmp_path / "fixed", APPENDS)
    shared = load_tokenizer(str(tmp_path / "fixed"))
    assert shared.chat_template == APPENDS
    ids = fixed.apply_chat_template(CHAT[:1])
    assert isinstance(ids, list)
    assert fixed.decode(ids) == shared.decode(shared.encode("<|im_start|>user\n1 + 1?<|im_end|>\n"))
    assert fixed.tokenizer.apply_chat_template(CHAT[:1]) == ids
    assert fixed.eos_token == shared.eos_token
