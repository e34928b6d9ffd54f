"""Plans of a single copy with --tp-size: vLLM has as many ranks, in float32, and what contradicts that is refused
before anything starts.
"""

import json
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.placement.gpus import Need
from atropos_launcher.plan import site
from atropos_launcher.plan.services import Plan
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import ask_for, no_processes, plan

__all__ = ["no_processes"]

pytestmark = pytest.mark.usefixtures("no_processes")
QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
ON_CPU = ("arithmetic", QWEN, "--bridge", "single_copy")
ON_GPUS = ("gsm8k_single_copy", QWEN, "--gpus", "8x80", "--host-memory", "64")
HOST = ("--host-memory", "64")


def vllm_of(made: Plan) -> dict[str, str]:
    """The flags that vLLM is started with."""
    (words,) = [service.command for service in made.services if service.name == "vllm"]
    return {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def need_of(*words: str) -> tuple[Need, Plan]:
    made = plan(*words)
    need = site.need_of(ask_for(*words), made.site)
    assert need is not None
    return need, made


def test_vllm_has_as_many_ranks_in_float32_on_the_same_gpus() -> None:
    made = plan(*ON_GPUS, "--tp-size", "2")
    flags = vllm_of(made)
    assert (flags["--tensor-parallel-size"], flags["--dtype"]) == ("2", "float32")
    assert (made.site.placement.vllm, made.site.placement.trainer) == (("0", "1"), ("0", "1"))
    train.expect_fit(made, ask_for(*ON_GPUS, "--tp-size", "2"))
    alone = vllm_of(plan(*ON_GPUS))
    assert (alone["--tensor-parallel-size"], alone["--dtype"]) == ("4", "bfloat16")


@pytest.mark.parametrize("flag", ["--tp-size", "--trainer.tp-size", "--trainer.tp_size"])
@pytest.mark.parametrize("bridge", ["--bridge", "--bridge.kind"])
def test_a_typed_size_beats_the_one_rank_of_the_recipe(flag: str, bridge: str) -> None:
    flags = vllm_of(plan("arithmetic", QWEN, bridge, "single_copy", flag, "2"))
    assert (flags["--tensor-parallel-size"], flags["--dtype"]) == ("2", "float32")
    assert "--tensor-parallel-size" not in vllm_of(plan("arithmetic", QWEN, bridge, "single_copy", flag, "1"))
    assert "--tensor-parallel-size" not in vllm_of(plan("arithmetic", QWEN, flag, "2"))  # by broadcast


def test_the_kept_run_repeats_it(tmp_path: Path) -> None:
    made = plan(*ON_CPU, "--tp-size", "2")
    (tmp_path / "run.yaml").write_text(made.files["run.yaml"])
    assert vllm_of(plan(str(tmp_path / "run.yaml"))) == vllm_of(made)


def test_cores_are_shared_out_over_vllms_ranks() -> None:
    made = plan(*ON_CPU, "--tp-size", "2", "--layout.cores.vllm", "0-1")
    (vllm,) = [service for service in made.services if service.name == "vllm"]
    assert vllm.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            [*ON_GPUS, "--vllm.tensor-parallel-size", "4"],
            r"^vllm\.tensor_parallel_size 4: single copy with --tp-size 2 .* give --vllm\.tensor-parallel-size 2, or"
            r" train with one process \(--tp-size 1\)",
        ),
        ([*ON_CPU, "--vllm.tensor-parallel-size", "1"], r"^vllm\.tensor_parallel_size 1: "),
        ([*ON_GPUS, "--dtype", "bfloat16"], r"^dtype bfloat16: .* float32 weights .* give --dtype float32, or train"),
        ([*ON_CPU, "--vllm.dtype", "auto"], r"^vllm\.dtype auto: .* give --vllm\.dtype float32, or train"),
        ([*ON_GPUS[:2], "--gpus", "1x80"], r"takes 2 GPUs, .* vLLM has 0 and the trainer 0; .* give both 2, or train"),
        ([*ON_GPUS, "--layout.trainer", "2,3"], r"vLLM has 0, 1 and the trainer 2, 3; .* give both 2, or train"),
        ([*ON_GPUS, "--layout.vllm", "0,1,2"], r"vLLM has 0, 1, 2 and the trainer 0, 1, 2; "),
        ([*ON_CPU, "--trainer-ranks", "4"], r"this trainer has 4 ranks: give --trainer-ranks 1, or set --tp-size and"),
        ([*ON_CPU, "--trainer-ranks", "1"], r"--tp-size 2 does not divide the 1 trainer rank: give --trainer-ranks 2"),
        ([*ON_CPU, "--batch-invariant"], r"--batch-invariant trains on one device, but this trainer has 2 ranks"),
        (["gsm8k", QWEN, *HOST, "--gpus", "2x80"], "^--tp-size 2 does not divide the 1 trainer rank: give"),
        (
            ["gsm8k", QWEN, *HOST, "--gpus", "8x80", "--trainer-ranks", "8"],
            "8 trainer ranks on a machine, but its GPUs",
        ),
    ],
)
def test_what_contradicts_it_is_refused_with_the_value_and_the_remedy(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(*words, "--tp-size", "2")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            [*"gsm8k --gpus 4x80 --trainer.fsdp-size 2 --layout.vllm 0 --layout.trainer 1,2,3".split(), *HOST],
            "^--fsdp-size 2 does not divide",
        ),
        (
            ["arithmetic", "--trainer.bridge.kind", "single_copy"],
            r"trainer\.bridge\.kind single_copy: `bridge` at the top .* is broadcast",
        ),
    ],
)
def test_what_the_trainer_refuses_is_refused_before_anything_starts(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(words[0], QWEN, *words[1:])


def test_a_run_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base: arithmetic.yaml\nmodel: {QWEN}\nbridge: single_copy\ntrainer: {{tp_size: 2}}\n")
    with pytest.raises(ConfigError, match=r"^vllm\.tensor_parallel_size 1: "):
        plan(str(mine))
    mine.write_text(mine.read_text() + "vllm: {tensor_parallel_size: 2}\n")
    assert vllm_of(plan(str(mine)))["--tensor-parallel-size"] == "2"


@pytest.mark.parametrize(("rows", "refused"), [(1024, False), (1000, True), (64 * 3, False)])
def test_a_vocabulary_that_vllm_pads_is_refused(rows: int, refused: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "vocab_size": rows, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("arithmetic", str(tmp_path), "--bridge", "single_copy", "--tp-size", "2")
    need, made = need_of(*words)
    why = need.refusal(made.site.placement)
    assert (why is not None) is refused, why
    assert why is None or f"a vocabulary that 64 divides, and vLLM pads that of this model, of {rows} tokens" in why


def test_on_a_cpu_the_ranks_have_the_weights_once_together() -> None:
    need, made = need_of(*ON_CPU, "--tp-size", "2")
    training = need.verdict(made.site.placement).training
    assert (training.ranks, training.split) == (2, 2)
    gradients = next(item.nbytes for item in training.states["device"] if item.what == "gradients")
    assert 2 * gradients == 4 * need.size.count
    lines = need.lines(made.site.placement, 10**9)
    assert any("vLLM: KV cache                                     2.000 GB" in line for line in lines)  # of two ranks
    (shown,) = [line for line in lines if "trainer of each of 2 ranks: gradients" in line]
    assert f"{4 * need.size.count / 1e9:.3f} GB" in shown


def test_each_rank_of_vllm_on_a_cpu_has_a_cache() -> None:
    need, made = need_of("arithmetic", QWEN, "--vllm.tensor-parallel-size", "2")
    lines = need.lines(made.site.placement, 10**9)
    assert any("vLLM: KV cache                                     2.000 GB" in line for line in lines)


def test_a_family_that_the_trainer_cannot_split_is_refused_before_anything_starts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "vocab_size": 1024, **sizes, **experts}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_moe"}))
    need, made = need_of("arithmetic", str(tmp_path), "--tp-size", "2")
    why = need.refusal(made.site.placement)
    assert why is not None
    assert "Llama, Mistral, Qwen2 and Qwen3, and this model is a qwen3_moe: give --tp-size 1" in why
    need, made = need_of("arithmetic", str(tmp_path))
    assert need.refusal(made.site.placement) is None


MOE = "Qwen/Qwen3-30B-A3B"
ATTENTION = "--bridge.target-modules q_proj,k_proj,v_proj,o_proj"
MOE_AND_LORA = {
    "experts": (f"{MOE} --gpus 8x80", "whose experts take no adapter: train the attention's with " + ATTENTION),
    "attention": (f"{MOE} --gpus 8x80 {ATTENTION}", None),
    "no experts": ("Qwen/Qwen3-8B --gpus 8x80", None),
    "on CPUs": (MOE, "vLLM has no adapters beside experts on CPUs"),
}


@pytest.mark.parametrize("name", MOE_AND_LORA)
def test_an_adapter_of_experts_is_refused_by_the_plan_as_by_the_trainer(name: str) -> None:
    typed, said = MOE_AND_LORA[name]
    words = [*typed.split(), "--host-memory", "1000", "--dry-run"]
    need, made = need_of("gsm8k_lora", "--dataset", "arithmetic", "--model", *words)
    why = need.refusal(made.site.placement, 10**9)
    assert (why is None) if said is None else (why is not None and said in why)


@pytest.mark.parametrize(
    ("gpus", "sizes", "vllm", "trainer"),
    [
        ("3x80", ("--tp-size", "2"), "0", "1 2"),  # and not two GPUs for vLLM
        ("5x80", ("--tp-size", "4"), "0", "1 2 3 4"),
        ("4x80", ("--tp-size", "2"), "0 1", "2 3"),
        ("4x80", ("--trainer.fsdp-size", "3"), "0", "1 2 3"),
        ("7x80", ("--tp-size", "2", "--trainer.fsdp-size", "2"), "0 1", "2 3 4 5"),
    ],
)
def test_the_trainer_gets_gpus_that_its_sizes_divide(
    gpus: str, sizes: tuple[str, ...], vllm: str, trainer: str
) -> None:
    placement = plan("gsm8k", QWEN, *sizes, "--gpus", gpus, "--host-memory", "64").site.placement
    assert (" ".join(placement.vllm), " ".join(placement.trainer)) == (vllm, trainer)


@pytest.mark.parametrize(
    ("bridge", "staging", "why"),
    [
        ("broadcast", "none", r"bridge_staging none: bridge broadcast .* needs memory .*: drop it, or give device or"),
        ("reload", "none", r"bridge_staging none: bridge reload "),
        ("single_copy", "host", r"bridge_staging host: with bridge single_copy .* receives no weights .*: drop it"),
        ("lora", "host", r"bridge_staging host: with bridge lora "),
        ("broadcast", "host", None),
        ("reload", "device", None),
        ("single_copy", "none", None),
    ],
)
def test_staging_that_the_bridge_lacks_or_never_uses_is_refused(bridge: str, staging: str, why: str | None) -> None:
    words = ("arithmetic", QWEN, "--bridge", bridge, "--vllm.bridge-staging", staging)
    if why is None:
        assert vllm_of(plan(*words))["--bridge-staging"] == staging
        return
    with pytest.raises(ConfigError, match=why):
        plan(*words)


@pytest.mark.parametrize(
    ("bridge", "kept", "more", "why"),
    [
        ("broadcast", "some", (), r"kv_on_sync some: expected one of reset, keep, salt"),
        ("lora", "salt", (), r"kv_on_sync salt: bridge lora .* each policy version is another adapter: drop it"),
        ("restart", "keep", (), r"kv_on_sync keep: bridge restart .* each starts vLLM again: drop it"),
        ("broadcast", "keep", ("--batch-invariant",), r"kv_on_sync keep: .* not the bits .*batch_invariant"),
        ("restart", "reset", (), None),
        ("reload", "keep", (), None),
        ("single_copy", "salt", (), None),
    ],
)
def test_a_kv_cache_that_no_sync_leaves_is_not_kept(
    bridge: str, kept: str, more: tuple[str, ...], why: str | None
) -> None:
    words = ("arithmetic", QWEN, "--bridge", bridge, "--vllm.kv-on-sync", kept, *more)
    if why is None:
        made = plan(*words)
        assert bridge == "restart" or vllm_of(made)["--kv-on-sync"] == kept
        return
    with pytest.raises(ConfigError, match=why):
        plan(*words)


def test_what_the_kv_cache_keeps_is_a_flag_of_all_servers() -> None:
    found = plan("two_servers", QWEN, "--kv-on-sync", "salt")
    assert [service.command.count("salt") for service in found.services if service.name.startswith("vllm")] == [1, 1]


def test_no_remedy_of_the_memory_plan_is_one_that_the_trainer_refuses() -> None:
    large = ("gsm8k_single_copy", "Qwen/Qwen2.5-7B-Instruct", "--tp-size", "2", "--gpus", "8x80", "--host-memory", "64")
    with pytest.raises(ConfigError, match=r"needs .* for each of 2 trainer ranks") as raised:
        train.expect_fit(plan(*large), ask_for(*large))
    assert "adafactor" not in str(raised.value)  # it updates whole tensors


@pytest.mark.parametrize(("gpus", "fits"), [("2x80", True), ("1x80", False)])
def test_a_model_too_large_for_one_single_copy_is_pointed_to_two(gpus: str, fits: bool) -> None:
    words = ("gsm8k_single_copy", "Qwen/Qwen2.5-14B-Instruct", "--gpus", gpus, "--host-memory", "400")
    with pytest.raises(ConfigError, match=r"needs .* on GPU 0, and .* are free") as raised:
        train.expect_fit(plan(*words), ask_for(*words))
    assert ("or --bridge broadcast, whose two copies fit" in str(raised.value)) is fits
    if fits:
        instead = (*words, "--bridge", "broadcast")
        train.expect_fit(plan(*instead), ask_for(*instead))
