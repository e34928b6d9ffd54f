"""Routing replay on a tiny random Qwen3-MoE: bits, gradients, counts, and what hostile groups do."""

import base64
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from atroposlib.groups import Untrainable, check
from atroposlib.routing import pack, unpack
from atroposlib.wire.batching import GroupRequirements, RoutingShape
from example_trainer.data.batching import Sequence, make_batch
from example_trainer.data.packing import MicroBatch, micro_batches
from example_trainer.data.routing_replay import UNKNOWN, Routing, routers_of, routing_of, shape_of
from example_trainer.errors import TrainerError
from example_trainer.exact.check import Comparison
from example_trainer.loop.overlap import Part, together
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import Metrics, of_updates, values
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy, token_logprobs
from example_trainer.ranks.ranks import _array, _pack_array
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import SHAPE, VOCAB, as_records, item, tiny_model

CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP_K = 3, 6, 2
MOE_LAYERS = [0, 2]  # the one between them is dense
NEEDS = GroupRequirements(vocab_size=VOCAB, trainable_only=True, routing=RoutingShape(LAYERS, TOP_K, EXPERTS))


def moe_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    changes = dict(num_hidden_layers=LAYERS, moe_intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    config = Qwen3MoeConfig(**SHAPE | changes, mlp_only_layers=[1], norm_topk_prob=True, initializer_range=0.3)
    config._attn_implementation = PACKED_SDPA
    return Qwen3MoeForCausalLM(config)


def replaying(replay: str = "auto", seed: int = 0) -> Policy:
    policy = Policy(moe_model(seed))
    policy.routing = routing_of(policy.model, replay)
    return policy


def own_experts(tokens: NDArray[np.int64]) -> NDArray[np.uint16]:
    """What the model itself chooses for all tokens but the last, [length - 1, layers, top_k]."""
    model, found = moe_model(), np.zeros((len(tokens) - 1, LAYERS, TOP_K), np.uint16)
    for layer, router in routers_of(model).items():

        def keep(module: nn.Module, inputs: Any, output: tuple[Tensor, ...], layer: int = layer) -> None:
            found[:, layer] = output[2].numpy()

        router.register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens[None, :-1]))
    return found


def other_experts(experts: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Another set for every token and layer with experts."""
    found = experts.copy()
    found[:, MOE_LAYERS] = (found[:, MOE_LAYERS] + 1) % EXPERTS
    return found


def sequences(*lengths: int) -> list[Sequence]:
    generator = np.random.default_rng(0)
    return [
        Sequence(
            tokens=generator.integers(0, VOCAB, length),
            trained=np.arange(length) > length // 2,
            sampler_logprobs=np.full(length, -3.0, np.float32),
            advantages=np.ones(length, np.float32),
            reference_logprobs=None,
            temperature=1.0,
        )
        for length in lengths
    ]


def routed(each: Sequence, experts: NDArray[np.uint16] | None) -> Sequence:
    return replace(each, routed_experts=experts)


def rows(parts: list[Sequence]) -> MicroBatch:
    (batch,) = micro_batches(parts, 1000, CPU)
    return batch


def measure(policy: Policy, parts: list[Sequence], **flags: Any) -> Metrics:
    return batch_gradients(policy, [rows(parts)], LossSettings(objective="cispo"), **flags)


def gradients(policy: Policy, parts: list[Sequence]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    measured = values(measure(policy, parts))
    return measured, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def test_replaying_the_models_own_choice_changes_no_bit() -> None:
    plain = sequences(9, 14)
    replayed = [routed(each, own_experts(each.tokens)) for each in plain]
    free_metrics, free = gradients(Policy(moe_model()), plain)
    metrics, found = gradients(replaying(), replayed)
    assert free_metrics["loss"] == metrics["loss"]
    assert metrics["routing_disagreement"] == 0.0
    assert free.keys() == found.keys()
    for name, gradient in free.items():
        assert torch.equal(gradient, found[name]), name


def test_other_experts_change_the_logits_and_the_gradient_reaches_their_gates() -> None:
    (plain,) = sequences(12)
    experts = other_experts(own_experts(plain.tokens))
    free, replayed = rows([plain]), rows([routed(plain, experts)])
    policy = replaying()
    assert (token_logprobs(policy, free, 1) - token_logprobs(policy, replayed, 1)).abs().max() > 0.01
    measured, found = gradients(policy, [routed(plain, experts)])
    assert measured["routing_disagreement"] > 0.5  # the last layer reads what the first one computed with other experts
    for layer in MOE_LAYERS:
        gate = found[f"model.layers.{layer}.mlp.gate.weight"]
        used = np.unique(experts[:, layer])
        assert gate[used].abs().sum() > 0


def test_gates_are_the_trainers_own_scores_of_the_experts_given() -> None:
    router = routers_of(moe_model())[0]
    hidden = torch.randn(5, SHAPE["hidden_size"])
    given = torch.tensor([[[4, 1]]] * 5)
    probabilities = (hidden @ router.state_dict()["weight"].T).softmax(-1)[:, [4, 1]]
    routing = Routing({0: router}, replays=True)
    with routing.of(given, counted=True):
        _, weights, experts = router(hidden)
    assert torch.equal(experts.sort(-1)[0], given[:, 0].sort(-1)[0])
    expected = probabilities / probabilities.sum(-1, keepdim=True)
    order = (experts == given[:, 0]).all(-1)
    expected = torch.where(order[:, None], expected, expected.flip(-1))
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("replay", ["auto", "off"])
def test_the_column_counts_sets_that_differ_and_nothing_else(replay: str) -> None:
    known, unknown = sequences(11, 8)
    experts = own_experts(known.tokens)
    reordered = experts.copy()
    reordered[:4] = reordered[:4, :, ::-1]  # the same sets
    changed = reordered.copy()
    last = len(experts) - 1  # of the last layer and token, so that nothing after it changes
    changed[last, 2] = other_experts(experts)[last, 2]
    measured, _ = gradients(replaying(replay), [routed(known, changed), unknown])
    assert measured["routing_disagreement"] == 1 / (len(experts) * len(MOE_LAYERS))


def test_without_replay_the_experts_are_the_models_own() -> None:
    (plain,) = sequences(12)
    given = routed(plain, other_experts(own_experts(plain.tokens)))
    free = token_logprobs(Policy(moe_model()), rows([plain]), 1)
    policy = replaying("off")
    assert torch.equal(token_logprobs(policy, rows([given]), 1), free)
    measured, _ = gradients(policy, [given])
    assert measured["routing_disagreement"] > 0.5


def test_without_data_the_column_is_null_and_a_dense_model_has_none() -> None:
    measured, _ = gradients(replaying(), sequences(7))
    assert measured["routing_disagreement"] is None
    assert "routing_disagreement" not in gradients(Policy(dense()), sequences(7))[0]


def dense() -> PreTrainedModel:
    model = tiny_model()
    model.config._attn_implementation = PACKED_SDPA
    return model


def test_recomputed_activations_replay_too_and_count_once() -> None:
    parts = [routed(each, other_experts(own_experts(each.tokens))) for each in sequences(9, 14)]
    plain, expected = gradients(replaying(), parts)
    policy = replaying()
    policy.model.train()
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    measured, found = gradients(policy, parts)
    assert measured == plain
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_passes_before_the_gradient_are_not_counted() -> None:
    (plain,) = sequences(12)
    policy = replaying()
    token_logprobs(policy, rows([routed(plain, other_experts(own_experts(plain.tokens)))]), 1)
    measured, _ = gradients(policy, [routed(plain, own_experts(plain.tokens))])
    assert measured["routing_disagreement"] == 0.0


def test_of_several_updates_the_first_says_how_far_the_sampler_chose_otherwise() -> None:
    """A later one counts what the earlier ones changed."""
    (plain,) = sequences(12)
    own, other = (routed(plain, change(own_experts(plain.tokens))) for change in (np.copy, other_experts))
    updates = [measure(replaying(), [each]) for each in (own, other)]
    assert values(of_updates(updates))["routing_disagreement"] == 0.0
    assert values(of_updates(reversed(updates)))["routing_disagreement"] > 0.5  # type: ignore[operator]


def test_micro_batches_hold_the_experts_of_the_tokens_that_are_fed() -> None:
    first, second = sequences(6, 9)
    experts = np.arange(8 * LAYERS * TOP_K, dtype=np.uint16).reshape(8, LAYERS, TOP_K) % EXPERTS
    batch = rows([first, routed(second, experts)])
    assert batch.routing is not None
    assert (batch.routing[:5] == UNKNOWN).all()
    assert np.array_equal(batch.routing[5:].numpy(), experts)
    assert rows([first]).routing is None


def test_experts_of_a_group_reach_the_sequences_cut_as_their_tokens() -> None:
    group = routed_item()
    batch = make_batch(as_records([group]), seq_len=8, policy_version=0, needs=NEEDS)
    assert batch.rejected == {}
    for sequence, text in zip(batch.sequences, group["routed_experts"], strict=True):
        assert sequence.routed_experts is not None
        assert np.array_equal(sequence.routed_experts, unpack(text)[:8])
    ignoring = make_batch(as_records([group]), seq_len=8, policy_version=0, needs=structs.replace(NEEDS, routing=None))
    assert all(sequence.routed_experts is None for sequence in ignoring.sequences)


def test_arrays_keep_their_shape_between_ranks() -> None:
    array = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(array, enc_hook=_pack_array))
    assert np.array_equal(_array(np.ndarray, sent), array)


def routed_item(**changes: Any) -> dict[str, Any]:
    group = item([0.0, 1.0], longest=12)
    shapes = [(len(tokens) - 1, LAYERS, TOP_K) for tokens in group["tokens"]]
    return group | {"routed_experts": [pack(np.full(shape, 5)) for shape in shapes]} | changes


def test_strings_hold_narrow_and_wide_ids() -> None:
    for highest, width in ((255, 1), (256, 2), (65535, 2)):
        ids = np.array([[[0, highest]]])
        assert np.array_equal(unpack(pack(ids)), ids)
        assert unpack(pack(ids)).itemsize == width
    with pytest.raises(ValueError, match="from 0 to 65536 are not from 0 to 65535"):
        pack(np.array([[[0, 65536]]]))
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        pack(np.zeros((2, 2), int))


def head(layers: int, top_k: int, width: int, ids: bytes = b"") -> str:
    return base64.b64encode(layers.to_bytes(2, "little") + bytes([top_k, width]) + ids).decode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no base64!", "not base64"),
        ("\u2603", "not base64"),
        (7, "not base64"),
        ("", "0 bytes"),
        (head(0, TOP_K, 1), "0 layers"),
        (head(LAYERS, 0, 1), "0 experts per token"),
        (head(LAYERS, TOP_K, 4), "4 bytes per id"),
        (head(LAYERS, TOP_K, 1, b"\0" * 7), "7 bytes are not whole tokens"),
        (head(65535, 255, 2), "65535 layers x 255 experts per token; the trained model has 3 x 2"),
        (head(LAYERS, TOP_K, 1), "rows for 0 tokens"),
        (head(LAYERS, TOP_K, 1, b"\0" * 6 * 1000), "rows for 1000 tokens"),
    ],
)
def test_a_hostile_string_sets_its_group_aside(text: Any, why: str) -> None:
    group = routed_item()
    group["routed_experts"][1] = text
    with pytest.raises(Untrainable, match=why) as found:
        check(group, NEEDS)
    assert str(found.value).startswith("routed_experts[1]: ")
    batch = make_batch(as_records([group, routed_item()]), seq_len=64, policy_version=0, needs=NEEDS)
    assert list(batch.rejected) == [0]
    assert batch.groups == 1


def test_an_expert_beyond_the_model_and_a_missing_row_are_refused() -> None:
    group = routed_item()
    ids = unpack(group["routed_experts"][0]).copy()
    ids[2, 0, 1] = EXPERTS
    with pytest.raises(Untrainable, match="expert 6 is not one of the model's 6"):
        check(group | {"routed_experts": [pack(ids), group["routed_experts"][1]]}, NEEDS)
    with pytest.raises(Untrainable, match="1 entries for 2 sequences"):
        check(group | {"routed_experts": group["routed_experts"][:1]}, NEEDS)


@pytest.mark.parametrize("absent", [None, []])
def test_groups_without_experts_are_refused_only_if_they_are_required(absent: Any) -> None:
    group = routed_item(routed_experts=absent)
    check(group, NEEDS)
    with pytest.raises(Untrainable, match="--enable-return-routed-experts, or the trainer with --routing-replay auto"):
        check(group, structs.replace(NEEDS, routing_required=True))


def test_the_shape_is_read_from_the_model_and_a_dense_one_has_no_routing() -> None:
    assert shape_of(moe_model()) == (LAYERS, TOP_K, EXPERTS)
    assert shape_of(tiny_model()) is None
    assert routing_of(tiny_model(), "auto") is None
    with pytest.raises(TrainerError, match="--routing-replay required: LlamaForCausalLM has no router"):
        routing_of(tiny_model(), "required")


def test_a_router_that_chooses_twice_is_refused() -> None:
    class Grouped(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.topk(2).values + torch.topk(hidden, 2).values

    router = Grouped()
    routing = Routing({4: router}, replays=True)
    with routing.of(torch.zeros(3, 5, 2), counted=True), pytest.raises(TrainerError, match="layer 4 chooses experts 2"):
        router(torch.randn(3, 6))


def test_parts_of_a_batch_count_by_the_tokens_whose_experts_are_known() -> None:
    """--overlap computes a batch in parts; together they have measured what the whole batch would have."""
    first, second, unknown = sequences(9, 14, 6)
    changed = routed(first, other_experts(own_experts(first.tokens)))
    parts = []
    for members in ([changed, unknown], [routed(second, own_experts(second.tokens))]):
        comparison = Comparison()
        parts.append(Part(members, measure(replaying(), members, comparison=comparison), comparison))
    whole, _ = gradients(replaying(), [*parts[0].sequences, *parts[1].sequences])
    assert values(together(parts, 1.0))["routing_disagreement"] == whole["routing_disagreement"]
    assert whole["routing_disagreement"] > 0.1
