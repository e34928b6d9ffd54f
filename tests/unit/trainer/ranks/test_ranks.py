"""Several trainer ranks compute what one computes: FSDP2 on Gloo, tiny models, float32 unless a test says otherwise.

A run is made once, when a test asks for it, by one process that forks the ranks of all (rank_child.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from example_trainer.data.packing import MicroBatch, micro_batches
from example_trainer.model.loading import meta_model
from example_trainer.weights.gathered import write_safetensors
from example_trainer.weights.source import shapes_of
from tests.unit.trainer.fakes import item, model_folder
from tests.unit.trainer.rank_child import sequences
from tests.unit.trainer.rank_runs import Done, Job, Runs, largest_difference, running_jobs

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]

CPU = torch.device("cpu")
FAMILIES = {"llama": True, "qwen2": False, "qwen3": True, "qwen3_moe": False}  # whether head and embedding are tied
STEPS = 6
FEW_STEPS = 3
PADDING = item([1.0], seed=0)["tokens"][0][1]  # stands in a prompt of every run
BUDGET = 20  # tokens a micro-batch
# float32 sums in another order
LOSS, NORM, WEIGHTS = 2e-7, 1e-6, 1e-5
BF16 = {"compute_dtype": "bfloat16"}
LORA = {"weight_bridge_mode": "lora_only", "lora_r": 3, "lora_alpha": 8, "lr": 1e-2}
CLIPPED = {"max_grad_norm": 0.1, "adam_eps": 0.1, "lr": 1e-2}  # AdamW feels the size of gradients only beside eps
PENALTIES = {"kl_coef": 0.1, "entropy_coef": 0.01}


def beside(model: str) -> dict[str, object]:
    """Offline data has a share of each update. The examples themselves are made up, as the model has no tokenizer."""
    return {"offline_data": f"{model}/config.json", "offline_share": 0.3}


TAUGHT = {"distill_coef": 0.5, "entropy_coef": 0.01}
TAUGHT_TOP_K = TAUGHT | {"distill": "forward_kl", "distill_top_k": 4}
RECOMPUTED = {"old_logprobs": "recomputed"}
GSPO = {
    "algorithm": "gspo",
    "clip_eps": 0.5,
    "clip_eps_high": 1,
    "importance": "mask",
    "importance_level": "sequence",
    "importance_bounds": (0, 100),
    "off_policy_mask": 0.1,
    "kl_coef": 0.1,
    "kl_in": "reward",
}
CORRECTED = {"algorithm": "rloo", "loss_mean": "constant", "importance": "truncate"}
LORA_KL = {"weight_bridge_mode": "lora_restart", "kl_coef": 0.1}
LORA_WEIGHTS = 10 * WEIGHTS  # at ten times the learning rate, which is the size of AdamW's first steps
ADAPTER = "model/adapter_model.safetensors"
SAME_RESULT = {  # ways to spread a run that must not change it
    "gradient_checkpointing": Job("llama", settings={"gradient_checkpointing": True}),
    "weights stay gathered": Job("llama", settings={"reshard_after_forward": False}),
    "one sum of gradients": Job("llama", settings={"sync_gradients": "last"}),
    "all in host memory": Job("llama", settings={"offload": "all"}),
    "moments in host memory": Job("llama", settings={"offload": "moments"}),
    "replicas": Job("llama", settings={"fsdp_size": 1}),
    "replicas of shards": Job("llama", ranks=4, settings={"fsdp_size": 2}),
    "three ranks": Job("llama", ranks=3),
    "a sequence a pass": Job("llama", settings={"micro_batch_tokens": 1}),  # 15 of them: one pass is a copy
    "prefixes once, one rank": Job("llama", 1, settings={"share_prefixes": True}),
    "prefixes once": Job("llama", settings={"share_prefixes": True}),
    "a probe between gradient and update": Job("llama", more={"probe": True}),
    "in two parts": Job("llama", more={"parts": True}),
    "in two parts, one sum of gradients": Job("llama", settings={"sync_gradients": "last"}, more={"parts": True}),
    "in two parts, all in host memory": Job("llama", settings={"offload": "all"}, more={"parts": True}),
}
SHARED_TOO = (
    "penalties",
    "clipped",
    "sequences' ratios",
    "token's corrections",
    "recomputed",
    "taught",
    "taught by top k",
)
BIG = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Every run of this module, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    models = {
        family: model_folder(
            folder / "models" / family,
            family=family,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            pad_token_id=PADDING,
        )
        for family, tied in FAMILIES.items()
    }
    models["other"] = model_folder(folder / "models" / "other", seed=1, tie_word_embeddings=True, initializer_range=0.1)
    models["big"] = zeros_folder(folder / "models" / "big")
    jobs = {f"{family} {ranks}": Job(family, ranks, STEPS) for family in FAMILIES for ranks in (1, 2)}
    jobs |= {name: Job(job.model, job.ranks, FEW_STEPS, job.settings, job.more) for name, job in SAME_RESULT.items()}
    jobs["oneDNN"] = Job("llama", 2, FEW_STEPS, {"kernels": "onednn", "gradient_checkpointing": True})
    jobs["few steps"] = Job("llama", 1, FEW_STEPS)
    for ranks in (1, 2):
        moved = {"source": models["other"]}
        jobs |= {
            f"penalties {ranks}": Job("llama", ranks, 3, PENALTIES, moved | {"batch": {"given": True}}),
            f"few {ranks}": Job("llama", ranks, 2, more={"batch": {"groups": 1, "answers": 2}}),
            f"clipped {ranks}": Job("llama", ranks, 3, CLIPPED),
            f"sequences' ratios {ranks}": Job("llama", ranks, 2, GSPO, {"batch": {"given": True}}),
            f"token's corrections {ranks}": Job("llama", ranks, 2, CORRECTED),
            f"recomputed {ranks}": Job("llama", ranks, 2, RECOMPUTED, {"batch": {"top_p": 0.8}}),
            f"taught {ranks}": Job("llama", ranks, 2, TAUGHT),
            f"taught by top k {ranks}": Job("llama", ranks, 2, TAUGHT_TOP_K, {"batch": {"top_p": 0.8}}),
            f"lora taught by top k {ranks}": Job("llama", ranks, 2, LORA | TAUGHT_TOP_K),
            f"demonstrations {ranks}": Job("llama", ranks, 3, beside(models["llama"]), {"offline_sides": 1}),
            f"pairs {ranks}": Job("llama", ranks, 3, beside(models["llama"]), {"offline_sides": 2}),
            f"pairs, another start {ranks}": Job(
                "llama", ranks, 3, beside(models["llama"]) | PENALTIES, moved | {"offline_sides": 2}
            ),
            f"lora {ranks}": Job("llama", ranks, STEPS, LORA),
            f"lora, prefixes once {ranks}": Job("llama", ranks, 2, LORA | {"share_prefixes": True}),
            f"lora resumed {ranks}": Job("llama", ranks, 1, LORA, {"source": str(folder / "lora 1/model")}, "lora 1"),
            f"lora bfloat16 {ranks}": Job("qwen3", ranks, 2, LORA | BF16 | LORA_KL),
        }
    for name in SHARED_TOO:
        job = jobs[f"{name} 1"]
        shared = dict(job.settings or {}) | {"share_prefixes": True}
        jobs[f"{name}, prefixes once"] = Job("llama", 1, job.steps, shared, job.more)
    jobs |= {
        "bfloat16": Job("llama", 2, STEPS, BF16),
        "bfloat16, chunks of 2": Job("llama", 2, 1, BF16, {"chunk_rows": 2}),
        "bfloat16, chunks of 1000": Job("llama", 2, 1, BF16, {"chunk_rows": 1000}),
        "small steps": Job("llama", 1, 100, BF16 | {"lr": 1e-6}, {"batch": {"groups": 1}}),
        "big": Job("big", 2, 0, more={"unchecked": True}),
    }
    for name, job in jobs.items():
        # shared prefixes are in other sums where there are other ranks: most tests compare more closely than that
        settings = {"micro_batch_tokens": BUDGET, "dual_clip": 0, "share_prefixes": False} | dict(job.settings or {})
        more = {"chunk_rows": 5} | dict(job.more or {})
        jobs[name] = Job(models[job.model], job.ranks, job.steps, settings, more, job.after)
    with running_jobs(jobs, folder) as runs:
        yield runs


def zeros_folder(path: Path) -> str:
    """A model of about 300 MB."""
    model_folder(path, **BIG | {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8})
    config = path / "config.json"
    for small, big in (
        ('"num_hidden_layers": 1', '"num_hidden_layers": 24'),
        ('"hidden_size": 8', '"hidden_size": 512'),
    ):
        config.write_text(config.read_text().replace(small, big))
    config.write_text(config.read_text().replace('"intermediate_size": 8', '"intermediate_size": 1408'))
    shapes = shapes_of(meta_model(str(path)))
    tensors = ((name, torch.zeros(shape)) for name, shape in shapes.items())
    write_safetensors(path / "model.safetensors", shapes, tensors, "llama")
    return str(path)


def expect_agreement(
    one: Done, several: Done, path: str = "model/model.safetensors", loss: float = 1e-6, weights: float = WEIGHTS
) -> None:
    assert several.column("loss") == pytest.approx(one.column("loss"), abs=loss)
    assert several.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=NORM)
    assert largest_difference(one.tensors(path), several.tensors(path)) <= weights
    assert several.results["logprobs"] == pytest.approx(one.results["logprobs"], abs=1e-4)


def passes(budget: int, rank: int = 0) -> list[list[MicroBatch]]:
    """A rank's micro-batches in each step of a run on two ranks."""
    return [micro_batches(sequences(step)[0], budget, CPU, rank, 2) for step in range(STEPS)]


def test_the_runs_have_several_passes_a_rank_packed_ones_and_copies() -> None:
    packed, alone = passes(BUDGET) + passes(BUDGET, 1), passes(1) + passes(1, 1)
    assert all(len(step) >= 2 for step in packed)
    assert any(len(batch.lengths) > 1 for step in packed for batch in step)
    assert any(not batch.counted for step in alone for batch in step)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_agree_with_one(done: Runs, family: str) -> None:
    expect_agreement(done[f"{family} 1"], done[f"{family} 2"], loss=LOSS)


@pytest.mark.rotating
@pytest.mark.parametrize("name", SAME_RESULT)
def test_how_a_run_is_spread_does_not_change_it(done: Runs, name: str) -> None:
    expect_agreement(done["few steps"], done[name], weights=3 * WEIGHTS)


@pytest.mark.rotating
def test_ranks_multiply_by_onednn(done: Runs) -> None:
    expect_agreement(done["few steps"], done["oneDNN"], loss=10 * LOSS, weights=10 * WEIGHTS)


def test_metrics_are_of_all_ranks(done: Runs) -> None:
    one, two = done["llama 1"].results["steps"], done["llama 2"].results["steps"]
    for ours, theirs in zip(one, two, strict=True):
        assert ours.keys() == theirs.keys()
        # counts of differing bits depend on rounding
        same = [name for name in ours if name != "bit_exact/differing_tokens" and "different" not in name]
        assert {name: theirs[name] for name in same} == pytest.approx({name: ours[name] for name in same}, abs=1e-5)
        assert ours["bit_exact/tokens"] > 0


def test_every_rank_knows_the_least_memory_of_any(done: Runs) -> None:
    for rank in range(3):
        assert done["three ranks"].rank(rank)["least"] == [10, 18]


def test_settings_of_fsdp2_have_their_effect(done: Runs) -> None:
    def calls(name: str) -> tuple[int, int]:
        found = done[name].rank(0)["calls"]
        return found["gathers"][0], found["sums"][0]

    gathers, sums = calls("llama 2")
    count, probes = sum(map(len, passes(BUDGET))), 2 * 3
    assert sums == 3 * count  # two layers and the root
    assert calls("one sum of gradients")[1] == 3 * FEW_STEPS
    # the root once and two layers twice a pass, or each once a step; at the end all three for the logits of a probe
    assert gathers == 5 * count + probes + 13 + 3  # the check after loading runs the layers six times
    assert calls("weights stay gathered")[0] == 3 * FEW_STEPS + probes + 3 + 3


@pytest.mark.rotating
def test_penalties_agree_with_a_sharded_reference_and_log_probabilities_of_the_environment(
    done: Runs,
) -> None:
    one, two = done["penalties 1"], done["penalties 2"]
    expect_agreement(one, two)
    assert min(one.column("kl")) > 0.1
    assert two.column("kl") == pytest.approx(one.column("kl"), rel=1e-5)
    assert two.column("entropy") == pytest.approx(one.column("entropy"), rel=1e-5)
    reference = two.rank(0)["reference"].values()
    assert all(abs(2 * local[0] - whole[0]) <= 1 for local, whole in reference)  # nothing of it stays gathered
    assert len(reference) == len(two.rank(0)["parameters"])


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["sequences' ratios", "token's corrections"])
def test_objectives_and_corrections_agree(done: Runs, name: str) -> None:
    one, two = done[f"{name} 1"], done[f"{name} 2"]
    expect_agreement(one, two)
    figure = "importance_masked_frac" if name == "sequences' ratios" else "importance_truncated_frac"
    assert 0.05 < min(one.column(figure)) < max(one.column(figure)) < 0.95
    for column in (figure, "ratio_max", "ratio_mean", "pg_loss"):
        assert two.column(column) == pytest.approx(one.column(column), rel=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("name", SHARED_TOO)
def test_every_term_of_the_loss_agrees_where_prefixes_are_computed_once(done: Runs, name: str) -> None:
    whole, shared = done[f"{name} 1"], done[f"{name}, prefixes once"]
    expect_agreement(whole, shared, weights=3 * WEIGHTS)
    for column in ("ratio_max", "ratio_mean", "pg_loss", "entropy", "kl", "importance_masked_frac", "teacher_kl"):
        if whole.results["steps"][0].get(column) is not None:
            assert shared.column(column) == pytest.approx(whole.column(column), rel=1e-5, abs=1e-7)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["demonstrations", "pairs", "pairs, another start"])
def test_offline_examples_are_dealt_to_the_ranks(done: Runs, name: str) -> None:
    one, two = done[f"{name} 1"], done[f"{name} 2"]
    expect_agreement(one, two)
    metric = "sft_loss" if name == "demonstrations" else "dpo_loss"
    assert two.column(metric) == pytest.approx(one.column(metric), rel=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["taught", "taught by top k", "lora taught by top k"])
def test_what_a_teacher_says_reaches_every_rank(done: Runs, name: str) -> None:
    one, two = done[f"{name} 1"], done[f"{name} 2"]
    if name.startswith("lora"):
        expect_agreement(one, two, weights=LORA_WEIGHTS, path=ADAPTER)
    else:
        expect_agreement(one, two)
    assert two.column("teacher_kl") == pytest.approx(one.column("teacher_kl"), rel=1e-5)


@pytest.mark.rotating
def test_recomputed_log_probabilities_agree_after_an_update_too(done: Runs) -> None:
    """The metrics are of each batch's second update, in which the ratios are against the policy before the first."""
    one, two = done["recomputed 1"], done["recomputed 2"]
    expect_agreement(one, two)
    assert two.column("ratio_mean") == pytest.approx(one.column("ratio_mean"), rel=1e-5)
    assert all(ratio != 1 and ratio == pytest.approx(1, abs=0.1) for ratio in one.column("ratio_mean"))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("llama 1", "llama 2"),
        *(("few steps", name) for name in ("three ranks", "a sequence a pass", "prefixes once")),
    ],
)
def test_each_sequence_has_its_own_log_probabilities_however_it_was_dealt(done: Runs, one: str, several: str) -> None:
    expected, found = done[one].results["by_sequence"], done[several].results["by_sequence"]
    assert [len(values) for values in found] == [len(values) for values in expected]
    assert len(expected) == 15
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


@pytest.mark.rotating
def test_an_adapter_learns_the_same_from_shared_prefixes_on_ranks(done: Runs) -> None:
    one, two = (done[f"lora, prefixes once {ranks}"] for ranks in (1, 2))
    expect_agreement(one, two, path=ADAPTER, weights=LORA_WEIGHTS)
    few = [done["lora 1"].column(name)[:2] for name in ("loss", "grad_norm")]
    assert few == [pytest.approx(one.column(name), rel=1e-4) for name in ("loss", "grad_norm")]


@pytest.mark.rotating
def test_gradients_are_clipped_by_the_norm_over_all_ranks(done: Runs) -> None:
    one, two = done["clipped 1"], done["clipped 2"]
    assert min(one.column("grad_norm")) > 5 * CLIPPED["max_grad_norm"]
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=NORM)
    before, after = (one.tensors(f"{name}/model.safetensors") for name in ("start", "model"))
    assert largest_difference(before, after) > 1e-4
    assert largest_difference(after, two.tensors()) <= 1e-7


@pytest.mark.rotating
def test_a_batch_of_fewer_sequences_than_ranks_agrees(done: Runs) -> None:
    assert len(sequences(0, groups=1, answers=2)[0]) == 1
    expect_agreement(done["few 1"], done["few 2"])


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_bfloat16_computes_about_the_same(done: Runs) -> None:
    one, two = done["llama 1"], done["bfloat16"]
    assert two.column("loss") == pytest.approx(one.column("loss"), abs=3e-3)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=0.01)
    assert two.column("loss") != pytest.approx(one.column("loss"), abs=1e-6)  # it is bfloat16
    assert {*two.rank(0)["dtypes"].values()} == {"float32"}


@pytest.mark.rotating
def test_the_gradient_of_the_head_is_summed_in_float32(done: Runs) -> None:
    few, many = done["bfloat16, chunks of 1000"], done["bfloat16, chunks of 2"]
    assert many.column("grad_norm") == pytest.approx(few.column("grad_norm"), rel=1e-6)


@pytest.mark.rotating
def test_updates_smaller_than_bfloat16_are_kept(done: Runs) -> None:
    before, after = (done["small steps"].tensors(f"{name}/model.safetensors") for name in ("start", "model"))
    moved = sum(int((before[name] != after[name]).sum()) for name in before)
    assert moved >= 0.88 * sum(tensor.numel() for tensor in before.values())
    assert largest_difference(before, after) <= 1.1e-4  # 100 steps of at most about 1e-6: AdamW's first are largest


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("llama 2", 2), ("three ranks", 3), ("all in host memory", 2)])
def test_each_rank_holds_its_rows_of_weights_and_moments(done: Runs, name: str, ranks: int) -> None:
    shares = [done[name].rank(rank) for rank in range(ranks)]
    for parameter, (_, whole) in shares[0]["parameters"].items():
        rows = [share["parameters"][parameter][0][0] for share in shares]
        assert sum(rows) == whole[0]
        if ranks == 2:
            assert max(rows) - min(rows) <= 1
        for share in shares:
            assert share["moments"][parameter] == share["parameters"][parameter][0]


def test_replicas_share_the_weights_of_their_own_shards(done: Runs) -> None:
    shares = [done["replicas of shards"].rank(rank)["parameters"] for rank in range(4)]
    assert shares[0] == shares[2]
    assert shares[1] == shares[3]
    assert all(local[0] * 2 in (whole[0], whole[0] + 1) for local, whole in shares[0].values())


def test_no_rank_holds_the_model_while_it_loads(done: Runs) -> None:
    for rank in (0, 1):
        about = done["big"].rank(rank)
        nbytes = sum(4 * torch.Size(whole).numel() for _, whole in about["parameters"].values())
        first, most = about["anonymous"]
        assert nbytes > 280e6
        assert most - first <= 0.6 * nbytes


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "groups"), [("llama 2", 2), ("replicas", 3), ("replicas of shards", 3)])
def test_every_group_of_ranks_has_the_configured_deadline(done: Runs, name: str, groups: int) -> None:
    for rank in (0, 1):
        assert done[name].rank(rank)["seconds"] == [50.0] * groups


# --- LoRA -------------------------------------------------------------------------------------------------------------


def test_an_adapter_starts_the_same_on_any_number_of_ranks(done: Runs) -> None:
    path = "start/adapter_model.safetensors"
    assert largest_difference(done["lora 1"].tensors(path), done["lora 2"].tensors(path)) == 0
    assert any(tensor.any() for tensor in done["lora 2"].tensors(path).values())


def test_two_ranks_train_and_write_the_adapter_that_one_does(done: Runs) -> None:
    one, two = done["lora 1"], done["lora 2"]
    expect_agreement(one, two, ADAPTER, weights=LORA_WEIGHTS)
    for name in ("adapter_config.json",):
        assert (two.folder / "model" / name).read_bytes() == (one.folder / "model" / name).read_bytes()
    assert [path.name for path in sorted((two.folder / "model").iterdir())] == [
        path.name for path in sorted((one.folder / "model").iterdir())
    ]


def test_an_adapter_of_several_ranks_loads_in_peft(done: Runs) -> None:
    loaded = AutoPeftModelForCausalLM.from_pretrained(done["lora 2"].folder / "model", dtype=torch.float32)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        logprobs = loaded(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(done["lora 2"].results["logprobs"], abs=1e-4)
    assert logprobs.tolist() != pytest.approx(done["lora 2"].results["start"], abs=1e-2)


@pytest.mark.rotating
def test_an_adapter_resumes_on_another_number_of_ranks(done: Runs) -> None:
    kept = done["lora 1"].tensors(ADAPTER)
    for ranks in (1, 2):
        assert largest_difference(kept, done[f"lora resumed {ranks}"].tensors(f"start/{Path(ADAPTER).name}")) == 0
    expect_agreement(done["lora resumed 1"], done["lora resumed 2"], ADAPTER, weights=LORA_WEIGHTS)


@pytest.mark.rotating
def test_an_adapter_is_float32_on_a_base_in_the_compute_dtype(done: Runs) -> None:
    for ranks in (1, 2):
        about: dict[str, Any] = done[f"lora bfloat16 {ranks}"].rank(0)
        trained = {name for name in about["dtypes"] if ".lora_" in name}
        assert len(trained) == 2 * 7 * 2
        assert all((dtype == "float32") == (name in trained) for name, dtype in about["dtypes"].items())
        assert about["moments"].keys() == trained
    one, two = done["lora bfloat16 1"], done["lora bfloat16 2"]
    assert one.column("kl")[0] == two.column("kl")[0] == 0 < two.column("kl")[1]
    assert two.column("loss") == pytest.approx(one.column("loss"), abs=3e-3)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=0.01)
    for local, whole in done["lora 2"].rank(0)["parameters"].values():
        assert abs(2 * local[0] - whole[0]) <= 1
