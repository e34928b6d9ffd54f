"""Every row by name, with what a failure means for training and what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass

from sampler_doctor.rows import parameters, policy, tokens
from sampler_doctor.rows.session import Found, Session


@dataclass(frozen=True)
class Check:
    """A row of the table. `quick` ones run with --quick."""

    name: str
    run: Callable[[Session], Found]
    means: str
    remedy: str
    quick: bool = False


CHECKS = (
    Check(
        "distribution",
        policy.distribution,
        "the server does not compute these weights: every ratio of the trainer's loss is wrong",
        "compare --model with what the server loaded, then its dtype and quantisation; start it again",
        quick=True,
    ),
    Check(
        "decode",
        policy.decode,
        "sampled tokens have other log-probabilities than the policy: training is off-policy without saying so",
        "start the server without captured graphs (vLLM: --enforce-eager); if that helps, report it",
        quick=True,
    ),
    Check(
        "prompt log-probabilities",
        policy.prompt_logprobs,
        "a trainer or a teacher that reads log-probabilities from the server gets wrong ones",
        "compute them in the trainer, or try another release of the server",
        quick=True,
    ),
    Check(
        "decode against prefill",
        policy.decode_prefill,
        "the server gives one token two log-probabilities: a check by prompt log-probabilities does not see what it"
        " samples from",
        "trust the row that agrees with the reference; start the server without captured graphs",
    ),
    Check(
        "batch",
        policy.batch,
        "log-probabilities depend on who else is served, beyond rounding: no run can be explained",
        "lower the number of concurrent sequences; try another attention backend; report it",
        quick=True,
    ),
    Check(
        "sampling",
        policy.sampling,
        "tokens are not drawn from the distribution whose log-probabilities are given: the gradient is biased",
        "look for default sampling parameters (vLLM: --generation-config vllm), and send top_k and top_p yourself",
        quick=True,
    ),
    Check(
        "temperature",
        parameters.temperature,
        "log-probabilities at a temperature are neither raw nor processed: no trainer can use them",
        "sample at temperature 1, or recompute log-probabilities in the trainer",
        quick=True,
    ),
    Check(
        "top_p",
        parameters.top_p,
        "top_p is not what it says: tokens come from another set than the trainer assumes",
        "sample with top_p 1",
        quick=True,
    ),
    Check(
        "top_k",
        parameters.top_k,
        "top_k is not what it says: tokens come from another set than the trainer assumes",
        "sample without top_k",
    ),
    Check(
        "min_p",
        parameters.min_p,
        "min_p is not what it says: tokens come from another set than the trainer assumes",
        "sample without min_p",
    ),
    Check(
        "frequency_penalty",
        parameters.frequency_penalty,
        "log-probabilities under a penalty are neither raw nor processed",
        "sample without penalties",
    ),
    Check(
        "repetition_penalty",
        parameters.repetition_penalty,
        "log-probabilities under a penalty are neither raw nor processed",
        "sample without penalties",
    ),
    Check(
        "chat",
        tokens.chat,
        "chats reach the model as other tokens than the trainer builds from the template",
        "send token ids, or give the server the template of --model",
        quick=True,
    ),
    Check(
        "text",
        tokens.text,
        "a prompt as text becomes other tokens than the tokenizer's",
        "send token ids",
    ),
    Check(
        "double BOS",
        tokens.double_bos,
        "a rendered chat gets a second BOS, which the model has never seen",
        "send token ids, or add_special_tokens: false",
    ),
    Check(
        "stop token",
        tokens.stop,
        "the token that ends an answer is missing: the policy never learns to stop",
        "have the server return it (vLLM: return_token_ids), or append it, with its log-probability, in the trainer",
        quick=True,
    ),
    Check(
        "cache",
        policy.cache,
        "a prompt's answer depends on what was served before",
        "switch the prefix cache off, and report it",
        quick=True,
    ),
    Check(
        "length",
        tokens.length,
        "prompts that are too long are cut without an error: the model answers another question",
        "limit lengths in the client; switch truncation off (SGLang: --allow-auto-truncate)",
        quick=True,
    ),
    Check(
        "n",
        tokens.several,
        "answers of one group are equal: they have equal rewards, and teach nothing",
        "send n requests, each with its own seed",
        quick=True,
    ),
    Check(
        "seed",
        tokens.seed,
        "a run cannot be repeated",
        "send seeds that the server honours (SGLang: --enable-deterministic-inference)",
    ),
)
LORA = "LoRA"
LORA_WORDS = (
    "the served adapter is not the merged one: what was trained is not what is sampled",
    "compare lora_alpha, rank and target modules; serve merged weights",
)
STALE = "stale KV cache"
STALE_WORDS = (
    "answers after an update use keys and values of the weights before: training is off-policy without saying so",
    "reset the prefix cache at each update (vLLM: /reset_prefix_cache, SGLang: /flush_cache), with no request running",
)
NAMES = [*(check.name for check in CHECKS), LORA, STALE]
