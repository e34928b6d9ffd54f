"""An inference server with a real, tiny model, in which one fault at a time can be planted.

    python -m tests.unit.sampler_doctor.faulty_server [FAULT]     serves until Ctrl-C, and prints its URL and model

It speaks OpenAI's completions (with vLLM's extensions), chats, and SGLang's /generate. It decodes from a KV cache, has
a prefix cache by blocks and an adapter, and loads other weights.
"""

import copy
import json
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM

from tests.serving import Asked, Reply, ThreadedServer
from tests.unit.sampler_doctor.tiny import POSITIONS, save_adapter, save_model

BLOCK = 16  # tokens of a block of the prefix cache
ADAPTER = "tuned"
Style = Literal["vllm", "sglang", "openai"]
PLAIN = {"model", "prompt", "max_tokens", "temperature", "logprobs", "echo", "n", "seed", "top_p", "frequency_penalty"}

# Of each fault the row that has to find it.
FAULTS = {
    "weights: one norm is 2 % off": "distribution",
    "decode: positions one too far": "decode",
    "prefill: log-probabilities one place off": "prompt log-probabilities",
    "prefill: a prompt's last tokens rounded to bfloat16": "decode against prefill",
    "batch: padding is attended to": "batch",
    "sampling: from the five most probable tokens": "sampling",
    "temperature: divides log-probabilities twice": "temperature",
    "top_p: ignored": "top_p",
    "top_k: log-probabilities over one token more": "top_k",
    "min_p: an absolute probability": "min_p",
    "frequency_penalty: not renormalised": "frequency_penalty",
    "repetition_penalty: raises negative logits": "repetition_penalty",
    "chat: without the generation prompt": "chat",
    "text: without the tokenizer's BOS": "text",
    "BOS: before one that is there": "double BOS",
    "stop: left out of the answer": "stop token",
    "cache: blocks without what is before them": "cache",
    "length: cut without an error": "length",
    "n: one answer many times": "n",
    "seed: ignored": "seed",
    "LoRA: without its scale": "LoRA",
    "update: the prefix cache is kept": "stale KV cache",
    "update: decode has the old weights": "decode",
}


class Refuse(Exception):
    """400, with its words."""


class FaultySampler:
    """Serves the model of `directory`, and its adapter as `tuned`."""

    def __init__(self, directory: Path, adapter: Path, fault: str = "") -> None:
        self._fault, self._lock, self._running = fault, threading.Lock(), 0
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._adapter = adapter
        self._random = torch.Generator().manual_seed(0)
        self._load(directory)
        self._decoding = self._model

    def _has(self, fault: str) -> bool:
        return self._fault.startswith(fault)

    def _load(self, directory: Path) -> None:
        self._model: Any = LlamaForCausalLM.from_pretrained(directory).eval()
        if self._has("weights"):
            self._model.model.layers[1].input_layernorm.weight.data *= 1.02
        self._blocks: dict[tuple[int, ...], Any] = {}
        tuned: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(directory), self._adapter)
        if self._has("LoRA"):
            for module in tuned.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling = dict.fromkeys(module.scaling, 1.0)
        self._tuned = tuned.merge_and_unload().eval()

    # --- the model ----------------------------------------------------------------------------------------------------

    def _prefill(self, prompt: list[int], tuned: bool) -> tuple[Any, Tensor, int]:
        """KV cache, logits behind the prompt, and how many tokens were in the prefix cache."""
        past, start = DynamicCache(), 0
        if not tuned:
            for length in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
                if self._key(prompt, length) in self._blocks:
                    past, start = copy.deepcopy(self._blocks[self._key(prompt, length)]), length
                    break
        model = self._tuned if tuned else self._model
        logits = model(torch.tensor([prompt[start:]]), past_key_values=past).logits[0, -1]
        if not tuned:
            for length in range(BLOCK, len(prompt) + 1, BLOCK):
                if self._key(prompt, length) not in self._blocks:
                    kept = copy.deepcopy(past)
                    kept.crop(length)
                    self._blocks[self._key(prompt, length)] = kept
        return past, logits, start

    def _key(self, prompt: list[int], length: int) -> tuple[int, ...]:
        first = length - BLOCK if self._has("cache") else 0
        return (length, *prompt[first:length])

    def _step(self, past: Any, token: int, tuned: bool) -> Tensor:
        model = self._tuned if tuned else self._decoding if self._has("update: decode") else self._model
        place = past.get_seq_length() + self._has("decode")
        logits: Tensor = model(
            torch.tensor([[token]]), past_key_values=past, position_ids=torch.tensor([[place]])
        ).logits
        return logits[0, -1]

    @torch.inference_mode()
    def _answer(self, prompt: list[int], options: Mapping[str, Any], random: torch.Generator) -> dict[str, Any]:
        """One answer: tokens, log-probabilities, most probable tokens of each place."""
        tuned = options.get("adapter", False)
        computed = [7] * 8 + prompt if self._has("batch") and self._running > 1 else prompt
        past, logits, cached = self._prefill(computed, tuned)
        tokens: list[int] = []
        found: dict[str, Any] = {"tokens": tokens, "logprobs": [], "top": [], "finish": "length", "cached": cached}
        for _ in range(options["max_tokens"]):
            drawn, told = self._distributions(logits, prompt, tokens, options)
            greedy = options["temperature"] == 0
            token = int(drawn.argmax()) if greedy else int(torch.multinomial(drawn.exp(), 1, generator=random))
            is_end = token in options.get("stop_token_ids", []) or token == self._tokenizer.eos_token_id
            if is_end and self._has("stop"):
                found["finish"] = "stop"
                break
            values, ids = told.sort(descending=True)
            count = len(values) if options["top"] < 0 else options["top"]
            tokens.append(token)
            found["logprobs"].append(float(told[token]))
            found["top"].append(dict(zip(ids[:count].tolist(), values[:count].tolist(), strict=True)))
            if is_end:
                found["finish"] = "stop"
                break
            if len(tokens) < options["max_tokens"]:
                logits = self._step(past, token, tuned)
        return found

    def _distributions(
        self, logits: Tensor, prompt: list[int], tokens: list[int], options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities from which a token is drawn, and those that are told: processed, as SGLang does it."""
        changed, told_less = self._penalised(logits.double().clone(), prompt, tokens, options)
        temperature = options["temperature"] or 1.0
        changed /= temperature
        values, ids = changed.sort(descending=True)
        drawn = torch.full_like(changed, -torch.inf)
        keep = self._kept(values, options)
        drawn[ids[keep]] = values[keep]
        told = drawn
        if self._has("sampling"):
            told = changed
        elif self._has("temperature"):
            told = changed / temperature
        elif self._has("top_k"):
            told = torch.full_like(changed, -torch.inf)
            told[ids[: int(keep.sum()) + 1]] = values[: int(keep.sum()) + 1]
        return drawn.log_softmax(0), told.log_softmax(0) - told_less

    def _penalised(
        self, raw: Tensor, prompt: list[int], tokens: list[int], options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Logits behind penalties and bias, and by how much less than their log-softmax is told."""
        before = torch.zeros(1)
        if penalty := options.get("repetition_penalty"):
            for token in {*prompt, *tokens}:
                negative = raw[token] < 0 and not self._has("repetition_penalty")
                raw[token] = raw[token] * penalty if negative else raw[token] / penalty
        if penalty := options.get("frequency_penalty"):
            less = penalty * torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=len(raw))
            if self._has("frequency_penalty"):
                before = raw.logsumexp(0) - (raw - less).logsumexp(0)
            raw = raw - less
        for token, bias in options.get("logit_bias", {}).items():
            raw[int(token)] += bias
        return raw, before

    def _kept(self, values: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Which of the sorted logits can be drawn."""
        probabilities, place = values.softmax(0), torch.arange(len(values))
        keep = place < (5 if self._has("sampling") else options.get("top_k") or len(values))
        if (limit := options.get("top_p")) and not self._has("top_p"):
            keep &= probabilities.cumsum(0) - probabilities < limit
        if limit := options.get("min_p"):
            keep &= probabilities >= limit * (1 if self._has("min_p") else probabilities[0])
        return keep

    @torch.inference_mode()
    def _of_prompt(self, prompt: list[int]) -> list[float | None]:
        logprobs = self._model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        if self._has("prefill: a prompt's"):
            logprobs = logprobs.bfloat16().float()
        shift = 0 if self._has("prefill: log-probabilities") else 1
        return [None, *(float(logprobs[place - shift][prompt[place]]) for place in range(1, len(prompt)))]

    def _answers(self, prompt: list[int], options: Mapping[str, Any]) -> list[dict[str, Any]]:
        with self._lock:
            self._running += 1
        try:
            if len(prompt) + options["max_tokens"] > POSITIONS:
                if not self._has("length"):
                    raise Refuse(f"{len(prompt)} tokens, at most {POSITIONS}")
                prompt = prompt[-(POSITIONS - options["max_tokens"]) :]
            with self._lock:
                seed = None if self._has("seed") else options.get("seed")
                random = self._random if seed is None else torch.Generator().manual_seed(seed)
                count = options.get("n", 1)
                if self._has("n: one"):
                    found = [self._answer(prompt, options, random)] * count
                else:
                    found = [self._answer(prompt, options, random) for _ in range(count)]
                given = self._of_prompt(prompt) if options.get("of_prompt") else None
            return [{**each, "prompt": prompt, "of_prompt": given} for each in found]
        finally:
            with self._lock:
                self._running -= 1

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
        bos = self._tokenizer.bos_token_id
        has_bos = ids[:1] == [bos]
        if (has_bos and not self._has("BOS")) or (not has_bos and self._has("text")):
            return ids
        return [bos, *ids]

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's, with vLLM's `prompt_logprobs`, `token_ids` and names of tokens by id."""
        options = {**body, "top": body["logprobs"], "adapter": body["model"] == ADAPTER}
        options["of_prompt"] = body.get("prompt_logprobs") is not None
        answers = self._answers(self._ids(body["prompt"]), options)
        return {"choices": [_choice(answer) for answer in answers], "usage": _usage(answers[0])}

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """One token of a chat, with its most probable ones."""
        rendered = self._tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=not self._has("chat")
        )
        ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        answers = self._answers(ids, {**body, "top": body["top_logprobs"]})
        top = [{"token": f"token_id:{token}", "logprob": value} for token, value in answers[0]["top"][0].items()]
        return {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}], "usage": _usage(answers[0])}

    def generate(self, body: dict[str, Any]) -> Any:
        """SGLang's."""
        inside = body["sampling_params"]
        options = {
            **inside,
            "max_tokens": inside["max_new_tokens"],
            "top": body["top_logprobs_num"],
            "seed": inside.get("sampling_seed"),
            "adapter": body.get("lora_path") == ADAPTER,
            "of_prompt": "logprob_start_len" in body,
        }
        prompt = body["text"] if "text" in body else body["input_ids"]
        replies = [{"meta_info": _meta(answer)} for answer in self._answers(self._ids(prompt), options)]
        return replies if len(replies) > 1 else replies[0]

    def update(self, directory: str) -> dict[str, Any]:
        """Other weights; the prefix cache is emptied."""
        with self._lock:
            blocks, self._decoding = self._blocks, self._model
            self._load(Path(directory))
            if self._has("update: the prefix"):
                self._blocks = blocks
        return {"success": True}

    def plain_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's alone: tokens by their text, at most 5 log-probabilities, and `echo`."""
        unknown = body.keys() - PLAIN
        if unknown or body["logprobs"] not in range(6):
            raise Refuse(f"unknown or wrong: {sorted(unknown)}, logprobs {body['logprobs']}")
        ids = self._ids(body["prompt"])
        options = {**body, "top": body["logprobs"], "of_prompt": body.get("echo")}
        answers = self._answers(ids, options)
        return {"choices": [self._plain_choice(answer) for answer in answers], "usage": {"prompt_tokens": len(ids)}}

    def _plain_choice(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        before = answer["prompt"] if answer["of_prompt"] else []
        tops = [{self._text(token): value for token, value in top.items()} for top in answer["top"]]
        return {
            "logprobs": {
                "tokens": [self._text(token) for token in [*before, *answer["tokens"]]],
                "token_logprobs": [*(answer["of_prompt"] or []), *answer["logprobs"]],
                "top_logprobs": [*([None] * len(before)), *tops],
            },
            "finish_reason": answer["finish"],
        }

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def reply(self, asked: Asked, style: Style) -> Reply:
        """Answer a request, as vLLM, SGLang or another server would."""
        body = json.loads(asked.body or b"{}")
        routes: dict[str, Any] = {"/v1/models": lambda: {"data": [{"id": "tiny", "max_model_len": POSITIONS}]}}
        routes["/v1/chat/completions"] = lambda: self.chat(body)
        if style == "sglang":
            routes |= {"/get_model_info": dict, "/generate": lambda: self.generate(body)}
            routes["/update_weights_from_disk"] = lambda: self.update(body["model_path"])
        elif style == "openai":
            routes["/v1/completions"] = lambda: self.plain_completions(body)
        else:
            routes["/v1/completions"] = lambda: self.completions(body)
            routes["/collective_rpc"] = lambda: self.update(body["kwargs"]["weights_path"])
            routes |= {"/reset_prefix_cache": dict, "/version": lambda: {"version": "tiny"}}
        if asked.path not in routes:
            return Reply(404)
        try:
            return Reply(200, json.dumps(_without_infinity(routes[asked.path]())).encode())
        except Refuse as error:
            return Reply(400, json.dumps({"error": str(error)}).encode())


def _choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    given = answer["of_prompt"]
    rows = given and [
        None if value is None else {str(token): {"logprob": value}}
        for token, value in zip(answer["prompt"], given, strict=True)
    ]
    names = [{f"token_id:{token}": value for token, value in top.items()} for top in answer["top"]]
    tokens = [f"token_id:{token}" for token in answer["tokens"]]
    return {
        "token_ids": answer["tokens"],
        "logprobs": {"tokens": tokens, "token_logprobs": answer["logprobs"], "top_logprobs": names},
        "prompt_logprobs": rows,
        "finish_reason": answer["finish"],
    }


def _usage(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt_tokens": len(answer["prompt"]), "prompt_tokens_details": {"cached_tokens": answer["cached"]}}


def _meta(answer: Mapping[str, Any]) -> dict[str, Any]:
    pairs = zip(answer["logprobs"], answer["tokens"], strict=True)
    given = answer["of_prompt"]
    meta = {
        "prompt_tokens": len(answer["prompt"]),
        "cached_tokens": answer["cached"],
        "finish_reason": {"type": answer["finish"]},
        "output_token_logprobs": [[value, token, None] for value, token in pairs],
        "output_top_logprobs": [[[value, token, None] for token, value in top.items()] for top in answer["top"]],
    }
    if given:
        meta["input_token_logprobs"] = [[v, token, None] for v, token in zip(given, answer["prompt"], strict=True)]
    return meta


def _without_infinity(value: Any) -> Any:
    """As vLLM writes it, -9999."""
    if isinstance(value, float):
        return max(value, -9999.0)
    if isinstance(value, Mapping):
        return {name: _without_infinity(each) for name, each in value.items()}
    return [_without_infinity(each) for each in value] if isinstance(value, list) else value


def serve(sampler: FaultySampler, style: Style = "vllm", port: int = 0) -> ThreadedServer:
    """Serve until it is closed."""
    return ThreadedServer(lambda asked: sampler.reply(asked, style), port)


def main(argv: Sequence[str]) -> None:
    """Serve with the fault whose name begins with the first argument."""
    folder = Path(tempfile.mkdtemp(prefix="faulty-sampler-"))
    model = save_model(folder / "model", 0)
    fault = next((name for name in FAULTS if argv and name.startswith(argv[0])), "")
    with serve(FaultySampler(model, save_adapter(folder / "adapter", model), fault)) as server:
        print(f"{server.url} serves {model}, fault: {fault or 'none'}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
