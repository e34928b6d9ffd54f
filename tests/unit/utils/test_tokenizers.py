"""One loader of tokenizers: what AutoTokenizer makes of a directory, text within a text, and templates from files."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from atroposlib.envs.errors import EnvError, NoChatTemplate
from atroposlib.envs.sampling.chat_template import with_template
from atroposlib.envs.server_handling.sequences.sequence_book import SequenceNode, extended_prompt, fresh_prompt
from atroposlib.testing.tiny_tokenizer import CHATML, make_tiny_tokenizer, save_tiny_tokenizer
from atroposlib.utils.tokenizers import encode_within, load_tokenizer

TEXTS = ("<s>[INST] hello", "Q: what is it</s>Q: and now", "hello  x\n")
FORMS = ("prepend", "first", "never", "byte")
TURNS = (
    "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A:' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def trained(form: str) -> Tokenizer:
    """A small tokenizer of one of the forms in which SentencePiece's and GPT-2's are written to tokenizer.json."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.decoder = decoders.Metaspace()
    match form:
        case "prepend":
            core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        case "byte":
            core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            core.decoder = decoders.ByteLevel()
        case _:
            core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=form == "first")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    words = ["Q: what is it A: it is four Q: and now A: now five [INST] hello"] * 9
    core.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    return core


def saved(folder: Path, form: str, **config: Any) -> Path:
    folder.mkdir()
    trained(form).save(str(folder / "tokenizer.json"))
    model_type = config.pop("model_type")
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**marks, **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.rotating
@pytest.mark.slow
def test_a_tokenizer_is_the_one_that_autotokenizer_loads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    classes = ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer")
    overruled = 0
    for number, (form, legacy, name, kind) in enumerate(
        itertools.product(FORMS, (True, False), classes, ("llama", "qwen2", "mistral"))
    ):
        folder = saved(tmp_path / str(number), form, legacy=legacy, tokenizer_class=name, model_type=kind)
        theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
        plain = PreTrainedTokenizerFast.from_pretrained(folder)
        case = (form, legacy, name, kind)
        assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS], case
        overruled += any(plain.encode(text) != theirs.encode(text) for text in TEXTS)
    assert overruled > 10  # what the plain class alone would have read otherwise


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_second_turn_has_the_ids_of_the_whole_text(form: str, is_cut: bool) -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=trained(form), eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = TURNS
    turns = [{"role": "user", "content": "what is it"}]
    first = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompt = fresh_prompt(first, tokenizer, templated=True).tokens
    whole = tokenizer.encode(first + "four</s>", add_special_tokens=False)
    sampled = whole[len(prompt) : -1 if is_cut else None]
    said = tokenizer.decode(sampled, skip_special_tokens=True)
    node = SequenceNode(
        full_text=first + said,
        tokens=prompt + sampled,
        masked_tokens=[-100] * len(prompt) + sampled,
        logprobs=[1.0] * len(prompt) + [-0.1] * len(sampled),
    )
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "and now"}]
    second = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert second.startswith(node.full_text)
    ids = extended_prompt(second, node, tokenizer).tokens
    assert ids == tokenizer.encode(second, add_special_tokens=False)


def test_text_within_a_text_without_special_tokens_is_that_text() -> None:
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    )
    assert encode_within(tokenizer, "a") == [0]
    assert encode_within(tokenizer, "") == []


def test_a_base_model_without_a_template_is_told_in_one_line_and_takes_one_from_a_file(tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(tmp_path / "base", chat_template="")
    tokenizer = with_template(load_tokenizer(str(folder)), None, {})
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(NoChatTemplate, match=r"base has no chat template.*--env.chat_template.*--chat-template"):
        tokenizer.apply_chat_template(messages, tokenize=False)
    (tmp_path / "chatml.jinja").write_text(CHATML)
    given = with_template(tokenizer, str(tmp_path / "chatml.jinja"), {})
    text = given.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(NoChatTemplate):  # another environment's is as it was
        with_template(load_tokenizer(str(folder)), None, {}).apply_chat_template(messages)


def test_arguments_of_the_template_are_a_setting_that_a_call_overrides() -> None:
    shows = make_tiny_tokenizer(chat_template="{{ thinking }}")
    given = with_template(shows, None, {"thinking": "no"})
    assert given.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "no"
    assert given.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, thinking="yes") == "yes"


@pytest.mark.parametrize(
    ("content", "reason"), [("{% for %}", "cannot read the chat template"), (None, "No such file")]
)
def test_a_template_that_is_none_is_refused_with_its_file(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "odd.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(EnvError, match=reason) as refused:
        with_template(make_tiny_tokenizer(), str(file), {})
    assert str(file) in str(refused.value)
