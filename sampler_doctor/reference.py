"""The reference: the model's directory, computed by transformers in float32."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from sampler_doctor.servers.sampler import CannotTest

Array = NDArray[np.float64]
READ_BYTES = 1 << 24


def directory_of(model: str, flag: str = "--model") -> Path:
    """Return the directory of a model, which is downloaded where `model` is a Hugging Face id. Raises CannotTest, in
    which `flag` has named it.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (OSError, ValueError) as error:
        raise CannotTest(
            f"{flag} {model} is no directory, and cannot be downloaded: {str(error).splitlines()[0]}"
        ) from None


def digest(directory: Path) -> str:
    """Return the SHA-256 over names and contents of the files that are the model: weights and JSON."""
    total = hashlib.sha256()
    for path in sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")):
        total.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                total.update(piece)
    return f"sha256:{total.hexdigest()}"


class Reference:
    """What the weights of a directory compute. Raises CannotTest where transformers cannot load them."""

    def __init__(self, directory: Path, adapter: str | None = None) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            if adapter is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        except (OSError, ValueError, KeyError) as error:
            raise CannotTest(f"{adapter or directory} cannot be loaded: {str(error).splitlines()[0]}") from None
        self._model: Any = model.eval().to(self.device)
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.after = lru_cache(maxsize=64)(self._after)
        self._along = lru_cache(maxsize=8)(self._logits)  # two rows look at the same answers

    def along(self, prompt: Sequence[int], answer: Sequence[int]) -> Array:
        """Return the logits that predict each token of `answer`, [tokens, vocabulary]."""
        if len(answer) == 1:
            return self.after(tuple(prompt))[None]
        return self._along((*prompt, *answer[:-1]), len(answer))

    def _after(self, prompt: tuple[int, ...]) -> Array:
        """Return the logits behind `prompt`, [vocabulary]."""
        row: Array = self._logits(prompt, 1)[0]
        return row

    def _logits(self, tokens: tuple[int, ...], rows: int) -> Array:
        ids = torch.tensor([list(tokens)], device=self.device)
        with torch.inference_mode():
            logits = self._model(ids, logits_to_keep=rows, use_cache=False).logits[0]
        found: Array = logits.double().cpu().numpy()
        return found


def log_softmax(logits: Array) -> Array:
    """Return log-probabilities, over the last dimension; a logit may be minus infinity."""
    most = logits.max(-1, keepdims=True)
    shifted = logits - most
    found: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


class Words:
    """The model's tokenizer, where its directory has one."""

    def __init__(self, directory: Path) -> None:
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, KeyError):
            self.tokenizer = None
        self.names = lru_cache(maxsize=1)(self._names)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text` alone."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def _names(self) -> Mapping[str, int]:
        """Return the id of each text that one token alone has."""
        if self.tokenizer is None:
            return {}
        by_text: dict[str, list[int]] = {}
        for token in range(len(self.tokenizer)):
            by_text.setdefault(self.tokenizer.decode([token]), []).append(token)
        return {text: tokens[0] for text, tokens in by_text.items() if len(tokens) == 1}
