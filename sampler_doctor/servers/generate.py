"""SGLang's /generate, and servers that imitate it."""

from collections.abc import Mapping
from typing import Any

from sampler_doctor.servers.sampler import Answer, Ask, NotOffered, Sampler, answers_of, finite, in_form, offered

ROUTE = "/generate"
NAMES = {"seed": "sampling_seed"}  # of options that SGLang calls otherwise
OUTSIDE = {"cache_salt": "extra_key"}  # options that stand beside its sampling_params


class Generate(Sampler):
    """`vocabulary` is how many log-probabilities it is asked for at most."""

    protocol = "generate"
    product, version_route, imitation = "SGLang", "/get_server_info", "SGLang-style"

    def __init__(self, url: str, key: str | None, answer_s: float, vocabulary: int) -> None:
        super().__init__(url, key, answer_s)
        self.top = vocabulary

    def open(self, name: str | None) -> None:
        """Find the model's name, for chat, and how many log-probabilities it gives."""
        self.model = name or self._listed_model()
        answer, *_ = self.sample(Ask([1], top=self.top))
        if not answer.top or not answer.top[0]:
            raise NotOffered("log-probabilities")
        self.top = len(answer.top[0])

    def sample(self, ask: Ask) -> list[Answer]:
        inside = {NAMES.get(name, name): value for name, value in ask.options.items() if name not in OUTSIDE}
        body: dict[str, Any] = {
            "sampling_params": {"temperature": ask.temperature, "max_new_tokens": ask.tokens, **inside},
            "return_logprob": True,
            "top_logprobs_num": ask.top,
            **{OUTSIDE[name]: value for name, value in ask.options.items() if name in OUTSIDE},
        }
        body |= {"text": ask.prompt} if isinstance(ask.prompt, str) else {"input_ids": list(ask.prompt)}
        body |= {"logprob_start_len": 0} if ask.of_prompt else {}
        body |= {"lora_path": ask.model} if ask.model else {}
        with in_form(ROUTE):
            reply = self.post(ROUTE, body)
            answers = [_answer(each["meta_info"], ask) for each in (reply if isinstance(reply, list) else [reply])]
        return answers_of(ROUTE, ask, answers)

    def _listed_model(self) -> str:
        try:
            return self.first_model()
        except NotOffered:
            return "default"

    def load(self, directory: str) -> str:
        self.post("/update_weights_from_disk", {"model_path": directory})
        return "/update_weights_from_disk"


def _answer(info: Mapping[str, Any], ask: Ask) -> Answer:
    own = offered(info.get("output_token_logprobs"), "output_token_logprobs")
    top = info.get("output_top_logprobs") or [[]] * len(own)
    prompt = info.get("input_token_logprobs") if ask.of_prompt else None
    if ask.of_prompt and prompt is None:
        raise NotOffered("the answer has no input_token_logprobs")
    reason = info.get("finish_reason")
    return Answer(
        [token for _, token, *_ in own],
        [value for value, *_ in own],
        [finite({token: value for value, token, *_ in each or []}) for each in top],
        reason.get("type") if isinstance(reason, Mapping) else reason,
        info.get("prompt_tokens"),
        info.get("cached_tokens"),
        None if prompt is None else [value for value, *_ in prompt],
    )
