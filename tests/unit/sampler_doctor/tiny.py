"""A tiny random Llama with a tokenizer that has a BOS, as a model's directory."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

POSITIONS = 384
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_tokenizer(directory: Path) -> None:
    """Bytes, and <s> before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    bos = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def tiny_llama(seed: int) -> Any:
    """Two layers, and weights large enough that distributions are not flat."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def save_model(directory: Path, seed: int) -> Path:
    """Save model and tokenizer, and return the directory."""
    tiny_llama(seed).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_adapter(directory: Path, model: Path, alpha: int = 12) -> Path:
    """Save a LoRA adapter of `model` whose matrices are random, and return its directory."""
    torch.manual_seed(5)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
    adapted: Any = get_peft_model(LlamaForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(directory)
    return directory
