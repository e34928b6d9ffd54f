"""The parity probe sees a wrong parameter of every kind."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from example_trainer.bridges.parity import parity
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.weights.written import TrainedModel

SHAPE: dict[str, Any] = dict(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Served(VllmClient):
    """vLLM's part: scores a prompt with the model that it holds."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.no_grad()
    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor(token_ids)
        logprobs: torch.Tensor = self._model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found: list[float] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
        return found


@pytest.mark.parametrize(
    "config",
    [Qwen2Config(**SHAPE, tie_word_embeddings=True), Qwen3Config(**SHAPE, head_dim=16)],
    ids=["qwen2", "qwen3"],
)
def test_one_parameter_left_behind_shows_whichever_it_is(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    trained = AutoModelForCausalLM.from_config(config).eval()
    served = copy.deepcopy(trained)
    assert parity(TrainedModel(trained), Served(served)) < 1e-6
    for name, parameter in served.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
        assert parity(TrainedModel(trained), Served(served)) > 2e-5, name
        parameter.data.copy_(before)
    assert parity(TrainedModel(trained), Served(served)) < 1e-6
