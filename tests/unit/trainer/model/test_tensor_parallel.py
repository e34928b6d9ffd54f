"""Ranks that split layers compute what one computes: tensor parallelism on Gloo, alone and with FSDP2.

A run is made once, when a test asks for it, by one process that forks the ranks of all (rank_child.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from example_trainer.data.packing import micro_batches
from example_trainer.memory.tp_plans import MOST, PLANS, size_refusal, sizes, split_shapes
from example_trainer.model.loading import ModelError, meta_model
from example_trainer.model.tensor_parallel import expect_divisible, partial_parameters
from example_trainer.settings.config import TrainerConfig
from tests.unit.trainer.fakes import item, model_folder, tiny_model
from tests.unit.trainer.rank_child import sequences
from tests.unit.trainer.rank_runs import Done, Job, Runs, largest_difference, running_jobs

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = {"llama": True, "qwen2": False, "qwen3": True, "mistral": False}  # whether head and embedding are tied
STEPS, FEW = 6, 3
PADDING = item([1.0], seed=0)["tokens"][0][1]  # stands in a prompt of every run
BUDGET = 20  # tokens of a micro-batch
# float32 sums in another order, on any processor; AdamW's first steps divide by small moments
LOSS, NORM, WEIGHTS = 1e-6, 5e-6, 1e-4
PLAIN_LOSS, PLAIN_NORM = 3e-7, 2e-6  # of the families alone; with AVX-512 and without, at most half of it was seen
STEADY = {"adam_eps": 1e-4}  # where an embedding has gradients so small that AdamW's first steps are their rounding
TP: dict[str, Any] = {"tp_size": 2}
ADAPTER = "model/adapter_model.safetensors"
LORA = {"weight_bridge_mode": "lora_only", "lora_r": 3, "lora_alpha": 8, "lr": 1e-2}
RUNS: dict[str, Job] = {  # two ranks that split layers, each beside the same run of one process
    "odd vocabulary": Job("odd", settings=STEADY),
    "biases": Job("biased"),
    "checkpointing": Job("qwen3", settings={"gradient_checkpointing": True}),
    "prefixes once": Job("qwen3", settings={"share_prefixes": True}),
    "offload all": Job("qwen3", settings={"offload": "all"}),
    "offload moments": Job("qwen3", settings={"offload": "moments"}),
    "oneDNN": Job("llama", settings={"kernels": "onednn"}),
    "taught": Job("qwen3", settings={"distill_coef": 0.5}),
    "taught by top k": Job("qwen3", settings={"distill_coef": 0.5, "distill": "forward_kl", "distill_top_k": 4}),
    "penalties": Job("qwen3", settings={"kl_coef": 0.1, "entropy_coef": 0.01}, more={"batch": {"given": True}}),
    "recomputed": Job("qwen2", settings={"old_logprobs": "recomputed"}, more={"batch": {"top_p": 0.8}}),
    "lora": Job("qwen3", settings=LORA),
    "in two parts": Job("qwen3", more={"parts": True}),
    # both ranks hold the one key-value head
    "one head llama": Job("one llama"),
    "one head qwen2": Job("one qwen2"),
    "one head qwen3": Job("one qwen3"),
    "one head offload all": Job("one qwen3", settings={"offload": "all"}),
    "one head lora": Job("one qwen3", settings=LORA),
}
BITS = {"compute_dtype": "bfloat16"}


@contextmanager
def running(jobs: dict[str, Job], folder: Path) -> Iterator[Runs]:
    models = {
        family: model_folder(
            folder / "models" / family,
            family=family,
            vocab_size=98,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            pad_token_id=PADDING,
        )
        for family, tied in FAMILIES.items()
    }
    for family in ("llama", "qwen2", "qwen3"):
        models[f"one {family}"] = model_folder(
            folder / "models" / f"one {family}",
            family=family,
            vocab_size=98,
            num_key_value_heads=1,
            initializer_range=0.1,
        )
    models["odd"] = model_folder(folder / "models" / "odd", tie_word_embeddings=True, initializer_range=0.1)
    models["biased"] = model_folder(folder / "models" / "biased", family="qwen2", vocab_size=98, initializer_range=0.1)
    plain = {"micro_batch_tokens": BUDGET, "dual_clip": 0, "share_prefixes": False}
    made = {
        name: Job(
            models[job.model],
            job.ranks,
            job.steps,
            plain | dict(job.settings or {}),
            {"chunk_rows": 5} | dict(job.more or {}),
        )
        for name, job in jobs.items()
    }
    with running_jobs(made, folder) as runs:
        yield runs


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Every run of one or two ranks, by name."""
    jobs = {f"{family} one": Job(family, 1, STEPS) for family in FAMILIES}
    jobs |= {f"{family} two": Job(family, 2, STEPS, TP) for family in FAMILIES}
    for name, job in RUNS.items():
        settings = dict(job.settings or {})
        alone = {key: value for key, value in settings.items() if key not in ("offload", "kernels")}
        jobs[f"{name} one"] = Job(job.model, 1, FEW, alone, job.more)
        jobs[f"{name} two"] = Job(job.model, 2, FEW, settings | TP, job.more)
    jobs["never summed"] = Job("qwen3", 2, STEPS, TP, {"mutation": "never"})
    jobs["summed each time"] = Job("qwen3", 2, STEPS, TP, {"mutation": "each"})
    jobs["copies never summed"] = Job("one llama", 2, FEW, TP, {"mutation": "never"})
    jobs["copies summed each time"] = Job("one llama", 2, FEW, TP, {"mutation": "each"})
    jobs["bfloat16"] = Job("qwen3", 2, STEPS, TP | BITS)
    with running(jobs, tmp_path_factory.mktemp("tp")) as runs:
        yield runs


def differences(one: Done, several: Done, path: str = "model/model.safetensors") -> dict[str, float]:
    """Largest ones over the steps, of the gradient's norm relative ones."""
    norms = zip(one.column("grad_norm"), several.column("grad_norm"), strict=True)
    losses = zip(one.column("loss"), several.column("loss"), strict=True)
    return {
        "loss": max(abs(mine - other) for mine, other in losses),
        "norm": max(abs(other / mine - 1) for mine, other in norms),
        "weights": largest_difference(one.tensors(path), several.tensors(path)),
    }


def expect_agreement(one: Done, several: Done, path: str = "model/model.safetensors") -> None:
    found = differences(one, several, path)
    assert found["loss"] <= LOSS, found
    assert found["norm"] <= NORM, found
    assert found["weights"] <= WEIGHTS, found
    assert several.results["logprobs"] == pytest.approx(one.results["logprobs"], abs=1e-4)


def test_the_runs_have_four_micro_batches_and_more() -> None:
    assert all(len(micro_batches(sequences(step)[0], BUDGET, torch.device("cpu"), 0, 1)) >= 4 for step in range(STEPS))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_agree_with_one(done: Runs, family: str) -> None:
    one, two = done[f"{family} one"], done[f"{family} two"]
    expect_agreement(one, two)
    found = differences(one, two)
    assert found["loss"] <= PLAIN_LOSS, found
    assert found["norm"] <= PLAIN_NORM, found


@pytest.mark.rotating
@pytest.mark.parametrize("name", RUNS)
def test_settings_work_as_without(done: Runs, name: str) -> None:
    one, two = done[f"{name} one"], done[f"{name} two"]
    expect_agreement(one, two, ADAPTER if "lora" in name else "model/model.safetensors")
    for column in {"penalties": ("kl", "entropy"), "recomputed": ("ratio_mean",)}.get(name, ()):
        assert two.column(column) == pytest.approx(one.column(column), rel=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("one", "name"),
    [
        ("qwen3 one", "never summed"),
        ("qwen3 one", "summed each time"),
        ("one head llama one", "copies never summed"),
        ("one head llama one", "copies summed each time"),
    ],
)
def test_norms_of_queries_and_keys_and_copies_of_heads_must_be_summed_once(done: Runs, one: str, name: str) -> None:
    """Else the loss looks right, and the weights are not. The second way is that of a hook on the module's backward
    pass, which sums what it has summed before.
    """
    found = differences(done[one], done[name])
    assert found["loss"] < 1e-2
    assert found["norm"] > 10 * NORM
    assert found["weights"] > 10 * WEIGHTS


@pytest.mark.rotating
def test_bfloat16_computes_about_the_same(done: Runs) -> None:
    one, two = done["qwen3 one"], done["bfloat16"]
    assert two.column("loss") == pytest.approx(one.column("loss"), abs=3e-3)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=0.05)
    assert two.column("loss") != pytest.approx(one.column("loss"), abs=1e-6)


def test_metrics_count_each_token_once(done: Runs) -> None:
    one, two = done["qwen3 one"].results, done["qwen3 two"].results
    for ours, theirs in zip(one["steps"], two["steps"], strict=True):
        assert ours.keys() == theirs.keys()
        same = [name for name in ours if "different" not in name and "differing" not in name]
        assert {name: theirs[name] for name in same} == pytest.approx({name: ours[name] for name in same}, abs=1e-5)
    assert [len(values) for values in two["by_sequence"]] == [len(values) for values in one["by_sequence"]]


def test_each_rank_holds_its_part_of_what_is_split_and_the_same_of_the_rest(done: Runs) -> None:
    first, second = (done["qwen3 two"].rank(rank) for rank in (0, 1))
    split = {name for name, (own, whole) in first["parameters"].items() if own != whole}
    assert len(split) == 2 * 7 + 1  # of two layers, and the embedding, which is the head
    for name, (own, whole) in first["parameters"].items():
        assert first["moments"][name] == own
        if name in split:
            assert sorted(size / part for size, part in zip(whole, own, strict=True)) == [1, 2]
        else:
            assert first["digests"][name] == second["digests"][name], name
    odd = done["odd vocabulary two"].rank(0)["parameters"]
    assert odd["model.embed_tokens.weight"] == [[97, 32], [97, 32]]


def test_ranks_that_hold_the_same_head_hold_the_same_bits_of_it(done: Runs) -> None:
    first, second = (done["one head qwen2 two"].rank(rank) for rank in (0, 1))
    copied = [name for name in first["parameters"] if "k_proj" in name or "v_proj" in name]
    assert len(copied) == 2 * 4  # of two layers, weights and biases
    for name in copied:
        own, whole = first["parameters"][name]
        assert own == whole == first["moments"][name]
        assert first["digests"][name] == second["digests"][name], name
    shapes = {name: tuple(whole) for name, (_, whole) in first["parameters"].items()}
    counted = split_shapes(shapes, 2, 1)  # by the memory plan
    assert counted == {name: tuple(own) for name, (own, _) in first["parameters"].items()}


def test_groups_of_ranks_have_the_configured_deadline(done: Runs) -> None:
    assert done["llama two"].rank(0)["seconds"] == [50.0] * 3
    assert done["one head llama two"].rank(0)["mesh_seconds"] == {"tp": [50.0], "heads copies": [50.0] * 2}


@pytest.mark.nightly
def test_tensor_parallelism_with_fsdp2_and_replicas_agrees_with_one(tmp_path: Path) -> None:
    """Four ranks: two by two; two replicas of two that split; and every way in which FSDP2 may sum."""
    copied = {"two heads": {"tp_size": 4}, "one head 2 x 2": {}, "one head replicas": {"fsdp_size": 1}}
    four: dict[str, dict[str, Any]] = {
        "2 x 2": {},
        "replicas": {"fsdp_size": 1},
        "one sum of gradients": {"sync_gradients": "last"},
        "weights stay gathered": {"reshard_after_forward": False},
        "lora": LORA,
    }
    jobs = {f"{family} one": Job(family, 1, STEPS) for family in FAMILIES}
    jobs |= {f"{family} 2 x 2": Job(family, 4, STEPS, TP) for family in FAMILIES}
    jobs |= {name: Job("qwen3", 4, STEPS, TP | settings) for name, settings in four.items()}
    jobs |= {name: Job("qwen3" if "two" in name else "one qwen3", 4, STEPS, TP | copied[name]) for name in copied}
    jobs["one head one"] = Job("one qwen3", 1, STEPS)
    jobs |= {
        "odd one": Job("odd", 1, STEPS, STEADY),
        "odd 2 x 2": Job("odd", 4, STEPS, TP | STEADY),
        "lora one": Job("qwen3", 1, STEPS, LORA),
    }
    with running(jobs, tmp_path) as found:
        for family in (*FAMILIES, "odd"):
            expect_agreement(found[f"{family} one"], found[f"{family} 2 x 2"])
        for name in four:
            whole = name != "lora"
            one = found["qwen3 one" if whole else "lora one"]
            expect_agreement(one, found[name], "model/model.safetensors" if whole else ADAPTER)
        for name in copied:
            expect_agreement(found["qwen3 one" if "two" in name else "one head one"], found[name])
        shares = [found["2 x 2"].rank(rank)["parameters"] for rank in range(4)]
        for name, (_, whole) in shares[0].items():
            held = sum(torch.Size(share[name][0]).numel() for share in shares)
            norm = len(whole) == 1  # whole along "tp"
            assert held == torch.Size(whole).numel() * (2 if norm else 1), name


# --- what cannot be split ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tp", "says"),
    [
        ({}, 3, "--tp-size 3 does not divide the 4 attention heads of LlamaForCausalLM: give one of 1, 2, 4$"),
        (
            {"num_attention_heads": 6, "hidden_size": 48},
            3,
            "--tp-size 3 does not divide the 2 key-value heads of LlamaForCausalLM: give one of 1, 2, 6$",
        ),
        ({"intermediate_size": 49}, 2, "--tp-size 2 does not divide the 49 feed-forward features .*: give one of 1$"),
        (
            {"family": "qwen3_moe"},
            2,
            "--tp-size splits models of the families Llama, Mistral, Qwen2 and Qwen3, and Qwen3MoeForCausalLM is a"
            " qwen3_moe: give --tp-size 1, and share its weights by --fsdp-size",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_remedy(changes: dict[str, Any], tp: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        expect_divisible(tiny_model(**changes), tp)


def test_no_size_is_named_that_the_flag_refuses() -> None:
    why = size_refusal(sizes(128, 8, 53_248), 48, "Llama-3.1-405B")
    assert why is not None
    assert why.endswith("give one of 1, 2, 4, 8, 16, 32, 64")
    with pytest.raises(ValidationError, match="less than or equal to 64"):
        TrainerConfig.model_validate({"model_name": "m", "tp_size": MOST + 1})


def test_the_plans_name_modules_that_the_families_have(tmp_path: Path) -> None:
    for family, plan in PLANS.items():
        model: Any = meta_model(model_folder(tmp_path / family, family=family))
        layer = model.base_model.layers[0]
        for name in (*plan.enter, *plan.columns, *plan.rows, *plan.norms):
            layer.get_submodule(name)


def test_parts_of_sums_are_the_norms_of_queries_and_keys() -> None:
    assert len(partial_parameters(tiny_model("qwen3"))) == 2 * 2
    assert not partial_parameters(tiny_model("llama"))
