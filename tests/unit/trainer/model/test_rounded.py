"""A model computes with weights of another dtype while it is asked to, and has its own again afterwards."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from example_trainer.model.rounded import rounded_weights

IDS = torch.tensor([[1, 2, 3, 4]])


def test_it_computes_as_the_rounded_model_does_and_keeps_its_weights(model: str) -> None:
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rounded = copy.deepcopy(own)
    for parameter in rounded.parameters():  # its table of rotary frequencies stays
        parameter.data = parameter.data.to(torch.bfloat16).float()
    before = {name: parameter.detach().clone() for name, parameter in own.named_parameters()}
    plain = own(IDS).logits
    with rounded_weights(own, torch.bfloat16):
        assert torch.equal(own(IDS).logits, rounded(IDS).logits)
    assert torch.equal(own(IDS).logits, plain)
    assert not torch.equal(plain, rounded(IDS).logits)
    assert all(torch.equal(before[name], parameter) for name, parameter in own.named_parameters())


def test_a_pass_that_fails_leaves_the_weights_as_they_were(model: str) -> None:
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in own.named_parameters()}

    def fail(*args: object) -> None:
        raise ValueError

    own.model.layers[0].mlp.act_fn.register_forward_pre_hook(fail)
    with pytest.raises(ValueError), rounded_weights(own, torch.bfloat16):  # noqa: PT011
        own(IDS)
    assert all(torch.equal(before[name], parameter) for name, parameter in own.named_parameters())


def test_weights_of_no_more_bits_stay(model: str) -> None:
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = own(IDS).logits
    with rounded_weights(own, torch.float32):
        assert torch.equal(own(IDS).logits, plain)
