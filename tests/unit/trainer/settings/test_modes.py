"""The guide's flags choose a bridge mode, a flag of another mode is refused, and nothing of torch is loaded for it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.config import config_yaml, resolve_config
from atroposlib.flags import ConfigError
from example_trainer.bridges import BRIDGES
from example_trainer.settings.bridges import MODES, Broadcast, Lora, LoraRestart, Reload, Restart, Sglang, SingleCopy
from example_trainer.settings.config import TrainerConfig

BROADCAST = ["--weight-bridge-mode", "shared_vllm", "--use-shared-memory"]


def resolved(*flags: str, env: dict[str, str] | None = None, text: str = "", tmp_path: Path = Path()) -> TrainerConfig:
    if text:
        (tmp_path / "run.yaml").write_text(text)
        flags = ("--config", str(tmp_path / "run.yaml"), *flags)
    return resolve_config(TrainerConfig, ["--model", "m", *flags], prog="grpo", env=env or {})[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], Restart()),
        (["--weight-bridge-mode", "none", "--vllm-restart-interval", "7"], Restart(restart_interval=7)),
        ([*BROADCAST, "--bridge-bucket-mb", "8", "--bridge-lease-s=9"], Broadcast(bucket_mb=8, lease_s=9)),
        ([*BROADCAST, "--bridge-sends", "gathered"], Broadcast(sends="gathered")),
        (["--use_shared_memory", "--weight_bridge_mode=shared_vllm"], Broadcast()),
        (["--weight-bridge-mode", "shared_vllm", "--single-copy", "--no-use-shared-memory"], SingleCopy()),
        (["--weight-bridge-mode", "reload", "--bridge-lease-s", "9"], Reload(lease_s=9)),
        (["--weight-bridge-mode", "sglang", "--bridge-bucket-mb", "8"], Sglang(bucket_mb=8)),
        (["--weight-bridge-mode", "lora_only", "--lora-r", "4"], Lora(r=4)),
        (
            ["--weight-bridge-mode", "lora_restart", "--lora-alpha", "4", "--vllm-gpu", "1"],
            LoraRestart(alpha=4, vllm_gpu="1"),
        ),
        (["--bridge.kind", "broadcast", "--bridge.bucket-mb", "3"], Broadcast(bucket_mb=3)),
    ],
)
def test_flags_choose_a_mode_and_its_settings(flags: list[str], expected: Any) -> None:
    assert resolved(*flags).bridge == expected


def test_every_mode_has_a_bridge_and_is_what_the_guide_types() -> None:
    assert set(BRIDGES) == set(MODES)
    for kind, mode in MODES.items():
        assert type(resolved("--weight-bridge-mode", *mode.typed.split()).bridge) is mode
        assert type(resolved("--bridge.kind", kind).bridge) is mode


@pytest.mark.parametrize(
    ("flags", "flag", "belongs_to", "mode"),
    [
        (["--use-shared-memory"], "--use-shared-memory", "broadcast", "restart"),
        (["--use-shared-memory", "--weight-bridge-mode", "lora_only"], "--use-shared-memory", "broadcast", "lora"),
        (["--single-copy", "--bridge.kind", "broadcast"], "--single-copy", "single_copy", "broadcast"),
        ([*BROADCAST, "--lora-r", "16"], "--lora-r", "lora", "broadcast"),
        (["--weight-bridge-mode", "reload", "--use-shared-memory"], "--use-shared-memory", "broadcast", "reload"),
        (["--weight-bridge-mode", "lora_only", "--bridge-bucket-mb", "16"], "--bridge-bucket-mb", "broadcast", "lora"),
        (["--weight-bridge-mode", "reload", "--bridge-delta"], "--bridge-delta", "broadcast", "reload"),
        (["--weight-bridge-mode", "lora_only", "--master-port", "0"], "--master-port", "broadcast", "lora"),
        (["--vllm-flags", "--enforce-eager --x 1", *BROADCAST], "--vllm-flags", "restart", "broadcast"),
        ([*BROADCAST, "--bridge.bf16-update", "master"], "--bf16-update", "single_copy", "broadcast"),
        (["--bridge-lease-s", "3"], "--bridge-lease-s", "broadcast", "restart"),
    ],
)
def test_a_flag_of_another_mode_is_refused(flags: list[str], flag: str, belongs_to: str, mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*flags)
    said = str(caught.value)
    assert said.startswith(f"{flag} belongs to ")
    assert f"{belongs_to} (--weight-bridge-mode {MODES[belongs_to].typed})" in said
    assert f"but the mode is {mode} (--weight-bridge-mode {MODES[mode].typed}): drop {flag}, or " in said


def test_yaml_takes_the_old_keys_and_the_new_ones(tmp_path: Path) -> None:
    old = "weight_bridge_mode: shared_vllm\nuse_shared_memory: true\nbridge_bucket_mb: 2\n"
    new = "bridge: {kind: broadcast, bucket_mb: 2}\n"
    for text in (old, new):
        assert resolved(text=text, tmp_path=tmp_path).bridge == Broadcast(bucket_mb=2)
        assert resolved("--bridge-bucket-mb", "5", text=text, tmp_path=tmp_path).bridge == Broadcast(bucket_mb=5)
        assert resolved("--bridge.bucket-mb", "5", text=text, tmp_path=tmp_path).bridge == Broadcast(bucket_mb=5)
    with pytest.raises(ConfigError, match="--lora-r belongs to"):
        resolved(text=old + "lora_r: 4\n", tmp_path=tmp_path)
    assert (
        resolved("--use-shared-memory", text="weight_bridge_mode: shared_vllm\n", tmp_path=tmp_path).bridge
        == Broadcast()
    )


def test_variables_of_another_mode_are_left_out() -> None:
    env = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NUM_INFERENCE_NODES": "0"}
    assert resolved(*BROADCAST, env=env).bridge == Broadcast(master_addr="10.0.0.1", master_port=29500)
    assert resolved(*BROADCAST, "--master-port", "1", env=env).mode(Broadcast).master_port == 1
    assert resolved("--weight-bridge-mode", "lora_only", env=env).bridge == Lora()


def test_the_resolved_configuration_shows_the_choice_and_is_read_again(tmp_path: Path) -> None:
    config = resolved(*BROADCAST, "--bridge-bucket-mb", "8")
    shown = yaml.safe_load(config_yaml(config))
    assert shown["bridge"]["kind"] == "broadcast"
    assert shown["bridge"]["bucket_mb"] == 8
    assert not {"weight_bridge_mode", "use_shared_memory", "single_copy", "lora_r"} & (
        shown.keys() | shown["bridge"].keys()
    )
    assert resolved(text=config_yaml(config), tmp_path=tmp_path) == config
    assert TrainerConfig(model_name="m", bridge=Broadcast(bucket_mb=8)) == config


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bridge.bukket-mb", "3"], "did you mean 'bridge.bucket_mb'?"),
        (
            [*BROADCAST, "--bridge-delta", "--bridge-sends", "direct"],
            "--bridge-delta and --bridge-sends direct cannot be combined, because rank 0 alone sends changes",
        ),
        (
            [*BROADCAST, "--bridge-bucket-mb", "0"],
            "bridge_bucket_mb: give 1 to 4096 MiB, or auto (got '0')",
        ),
        (
            ["--weight-bridge-mode", "nccl"],
            "--weight-bridge-mode nccl is not available; choose: --weight-bridge-mode none",
        ),
        (["--weight-bridge-mode", "shared_vllm", "--use-shared-memory=perhaps"], "use_shared_memory: expected true or"),
    ],
)
def test_a_wrong_choice_is_one_line(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*flags)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_of_a_mode_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'bridge\.bukket_mb'; did you mean 'bridge\.bucket_mb'\?"):
        resolved(text="bridge: {kind: broadcast, bukket_mb: 2}", tmp_path=tmp_path)


@pytest.mark.services
def test_the_modes_import_neither_torch_nor_vllm() -> None:
    heavy = {"torch", "vllm", "transformers"}
    code = f"import sys, example_trainer.settings.config; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


DECIDED = {
    "--compute-dtype": ("bfloat16",),
    "--kernels": ("onednn", "bfloat16"),
    "--offload": ("moments", "all"),
}
BY_VLLM = {"--batch-invariant": [*BROADCAST, "--batch-invariant"], "a single copy": ["--bridge.kind", "single_copy"]}


@pytest.mark.parametrize("who", BY_VLLM)
@pytest.mark.parametrize("wrong", [(flag, value) for flag, values in DECIDED.items() for value in values])
def test_what_vllm_decides_cannot_be_chosen(who: str, wrong: tuple[str, str]) -> None:
    flag, value = wrong
    assert not resolved(*BROADCAST, flag, value).keeps_tensors_whole
    with pytest.raises(ConfigError, match=rf"{flag} {value}: {who} (computes|keeps) .*; drop one of them"):
        resolved(*BY_VLLM[who], flag, value)
    assert resolved(*BY_VLLM[who]).keeps_tensors_whole


@pytest.mark.parametrize("kind", MODES)
def test_each_mode_is_exact_or_says_why_it_is_not(kind: str) -> None:
    mode = MODES[kind]
    assert bool(mode.never_exact) == (mode.external or mode.trains_adapter)
    if mode.never_exact:
        with pytest.raises(ConfigError, match=re.escape(mode.never_exact)):
            resolved("--bridge.kind", kind, "--batch-invariant")
    else:
        assert resolved("--bridge.kind", kind, "--batch-invariant").follows_vllm == "--batch-invariant"
