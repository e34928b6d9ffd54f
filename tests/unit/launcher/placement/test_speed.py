"""What a step takes on GPUs by arithmetic, and the layout of vLLM's GPUs that follows."""

from dataclasses import replace
from pathlib import Path

import pytest

from atropos_launcher.commands.train import described
from atropos_launcher.placement.gpus import Need, Placement, ServerNeed, ServerPlace
from atropos_launcher.placement.ports import Ports
from atropos_launcher.placement.speed import (
    SUM_S,
    active_weights,
    best_layout,
    card_of,
    layouts,
    sampling,
    speed_lines,
    training_s,
)
from atropos_launcher.plan.site import with_best_layout
from example_trainer.memory.model_size import model_size
from example_trainer.memory.plan import GB
from example_trainer.settings.config import TrainerConfig
from tests.unit.launcher.plans import ask_for, no_processes, on_gpus
from tests.unit.launcher.plans import plan as planned

__all__ = ["no_processes"]

FOUR = Placement((ServerPlace(("0", "1", "2", "3")),), ("4", "5", "6", "7"))
FOUR_SERVERS = replace(FOUR, servers=tuple(ServerPlace((gpu,)) for gpu in "0123"))


def need(model: str, gpu_gb: int = 80, **settings: object) -> Need:
    size = model_size(model)
    assert size is not None
    batch = {"batch_size": 8, "gradient_accumulation_steps": 8, "seq_len": 1024}
    config = TrainerConfig.model_validate({"model_name": model, "bridge": {"kind": "broadcast"}, **batch, **settings})
    return Need(config, size, gpu_gb * GB, (ServerNeed(1024, "bfloat16"),) * 4, 1000 * GB)


def test_a_token_reads_the_weights_and_half_full_caches_once() -> None:
    """Qwen3-8B: 8.191e9 weights without the embedding's 151,936 x 4,096, and 147,456 bytes of cache for each of 512
    tokens of 16 answers, at 3.35e12 bytes per second.
    """
    found = sampling(need("Qwen/Qwen3-8B"), FOUR_SERVERS)
    assert found is not None
    read = 2 * (8.1907e9 - 151_936 * 4096) + 16 * 512 * 147_456
    assert found.token_s == pytest.approx(read / 3.35e12, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(64 / found.token_s)


def test_tensor_parallel_ranks_read_a_part_each_and_add_two_sums_a_layer() -> None:
    alone = sampling(need("Qwen/Qwen3-8B"), replace(FOUR, servers=(ServerPlace(("0",)),)))
    split = sampling(need("Qwen/Qwen3-8B"), FOUR)
    assert alone is not None
    assert split is not None
    assert split.token_s - alone.token_s / 4 == pytest.approx(2 * 36 * SUM_S, rel=0.2)  # and 0.5 MB over the link


def test_many_answers_are_bound_by_operations_and_not_by_bytes() -> None:
    busy = sampling(need("Qwen/Qwen3-0.6B", batch_size=64, seq_len=64), replace(FOUR, servers=(ServerPlace(("0",)),)))
    assert busy is not None
    assert busy.rows == 256  # at once, of 512
    assert busy.tokens_per_s == pytest.approx(256 / busy.token_s)


def test_a_full_cache_bounds_the_answers_at_once() -> None:
    """Each answer of 32,768 tokens, half full, takes 2.4 GB of the 44 GB that a GPU of 80 has beside two copies."""
    long = replace(need("Qwen/Qwen3-8B"), servers=(ServerNeed(32_768, "bfloat16"),) * 4)
    found = sampling(long, replace(FOUR, servers=(ServerPlace(("0",)),)))
    assert found is not None
    assert found.rows == int((0.92 * 80e9 - 4 * 8.1907e9 - 2e9) / (147_456 * 16_384))


def test_a_mixture_reads_the_experts_that_any_token_chooses() -> None:
    size = model_size("Qwen/Qwen3-30B-A3B")
    assert size is not None
    one, many = active_weights(size, 1), active_weights(size, 64)
    assert 2.5e9 < one < 3.5e9  # "A3B"
    assert 0.9 * size.count < many < size.count


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(80 * GB, "H100"), (81_559 << 20, "H100"), (143_771 << 20, "H200"), (24_564 << 20, "RTX 4090"), (0, None)],
)
def test_a_card_is_known_by_its_memory(nbytes: int, name: str | None) -> None:
    card = card_of(nbytes)
    assert (card and card.name) == name


def test_a_gpu_that_no_data_sheet_matches_gets_no_figures() -> None:
    assert card_of(64 * GB) is None
    assert speed_lines(need("Qwen/Qwen3-0.6B", gpu_gb=64), FOUR) == []


def test_small_models_are_sampled_by_many_servers_and_large_ones_by_one() -> None:
    assert best_layout(layouts(need("Qwen/Qwen3-0.6B"), FOUR)) == 4
    assert best_layout(layouts(need("Qwen/Qwen3-8B"), FOUR)) == 1


def test_a_server_of_one_gpu_is_no_choice_where_the_model_does_not_fit_one() -> None:
    ways = layouts(need("Qwen/Qwen3-32B", optimizer="adamw", gradient_checkpointing=True), FOUR)
    assert 4 not in ways
    assert 1 in ways


def test_training_takes_six_operations_a_weight_and_eight_with_checkpointing() -> None:
    """64 rollouts of 1,024 tokens of Qwen3-8B on four H100s: attention multiplies 36 layers of 4,096 features."""
    plain, card = need("Qwen/Qwen3-8B"), card_of(80 * GB)
    assert card is not None
    seconds = training_s(plain, FOUR, card)
    operations = 65_536 * 6 * (8.1907e9 - 151_936 * 4096 + 36 * 4096 * 1024)
    assert seconds == pytest.approx(operations / (4 * 0.27 * 989e12), rel=1e-3)
    again = training_s(need("Qwen/Qwen3-8B", gradient_checkpointing=True), FOUR, card)
    assert again == pytest.approx(seconds * 8 / 6)


def test_the_lines_say_that_nothing_was_measured_and_which_layout_the_run_has() -> None:
    said = "\n".join(speed_lines(need("Qwen/Qwen3-8B"), FOUR))
    assert "by arithmetic" in said
    assert "not measured" in said
    assert "1 of 4 GPUs: 27,397 (this run); 2 of 2 GPUs" in said
    assert "broadcast" not in "\n".join(speed_lines(need("Qwen/Qwen3-8B", bridge={"kind": "lora"}), FOUR))
    elsewhere = replace(FOUR_SERVERS, apart=True)
    assert "broadcast" not in "\n".join(speed_lines(need("Qwen/Qwen3-8B"), elsewhere)), "a network's speed is not known"


@pytest.mark.parametrize(
    ("placement", "gpus", "at_once"),
    [
        (FOUR, 8, True),
        (replace(FOUR, trainer=("0", "1", "2", "3")), 4, False),
        (replace(FOUR_SERVERS, apart=True, trainer=("0", "1"), others=(("0", "1"),)), 8, True),
        (Placement((ServerPlace(("0",)),) * 2, ("0", "1"), (("0", "1"),)), 4, False),
    ],
)
def test_the_whole_run_takes_the_longer_of_two_or_both(placement: Placement, gpus: int, at_once: bool) -> None:
    asked = need("Qwen/Qwen3-8B", training_steps=100, gradient_checkpointing=True)
    found = sampling(asked, placement)
    assert found is not None
    times = (found.answers * 1024 / found.tokens_per_s, training_s(asked, placement, found.card))
    hours = 100 * (max(times) if at_once else sum(times)) / 3600
    (line,) = (line for line in speed_lines(asked, placement) if "all 100 steps" in line)
    assert f"all 100 steps on {gpus} GPUs" in line
    assert f"at least {hours:>8.3f} h, {hours * gpus:.3f} GPU hours" in line


def test_on_policy_the_whole_run_takes_both() -> None:
    asked = need("Qwen/Qwen3-8B", training_steps=100)
    found = sampling(asked, FOUR)
    assert found is not None
    hours = 100 * (found.answers * 1024 / found.tokens_per_s + training_s(asked, FOUR, found.card)) / 3600
    (line,) = (line for line in speed_lines(asked, FOUR, on_policy=True) if "all 100 steps" in line)
    assert f"at least {hours:>8.3f} h" in line
    assert "sampling and then training" in line


@pytest.mark.parametrize(("offpolicy", "on_policy"), [("0", True), ("2", False)])
@pytest.mark.usefixtures("no_processes")
def test_a_dry_run_counts_the_time_of_its_own_setting(
    offpolicy: str, on_policy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, list("0123"))
    words = ["gsm8k", "--env.max_batches_offpolicy", offpolicy]
    said = described(planned(*words), ask_for(*words))
    assert f"sampling {'and then' if on_policy else 'while'} training" in said


def test_a_step_with_offload_says_what_its_time_leaves_out() -> None:
    line = "without what --trainer.offload all costs"
    assert line not in "\n".join(speed_lines(need("Qwen/Qwen3-8B"), FOUR))
    assert line in "\n".join(speed_lines(need("Qwen/Qwen3-32B", seq_len=1024), FOUR))


def test_answers_are_as_long_as_the_environment_lets_them_become() -> None:
    long = need("Qwen/Qwen3-8B", seq_len=16384)
    found = sampling(long, FOUR)
    assert found is not None
    seconds = found.answers * 100 / found.tokens_per_s
    line = speed_lines(long, FOUR, 100)[1]
    assert line.split()[:9] == f"sampling {found.answers} answers of 100 tokens at least {seconds:.3f}".split()


def test_a_second_round_of_few_answers_takes_no_whole_round() -> None:
    """The bound and the rate beside it are one figure."""
    one = replace(FOUR, servers=(ServerPlace(("0",)),))
    many = need("Qwen/Qwen3-8B", seq_len=16384, batch_size=4, gradient_accumulation_steps=75)
    found = sampling(many, one)
    assert found is not None
    assert found.rows < found.answers
    line = speed_lines(many, one)[1]
    assert f"at least {300 * 16384 / found.tokens_per_s:>8.3f} s" in line


@pytest.mark.parametrize(
    ("typed", "servers"),
    [
        ([], 4),
        (["--vllm.count", "1"], 1),
        (["--vllm.count", "2"], 2),
        (["--vllm.tensor_parallel_size", "2"], 1),
        (["--layout.vllm", "0,1"], 1),
        (["--bridge", "reload"], 1),  # feeds one server
        (["--model", "Qwen/Qwen3-8B"], 1),
    ],
)
@pytest.mark.usefixtures("no_processes")
def test_a_run_takes_the_layout_that_samples_the_most_unless_the_user_chose(
    typed: list[str], servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, list("01234567"))
    asked = ask_for("gsm8k", *([] if "--model" in typed else ["--model", "Qwen/Qwen3-0.6B"]), *typed)
    assert len(with_best_layout(asked, Path("/run"), Ports()).run.servers) == servers
