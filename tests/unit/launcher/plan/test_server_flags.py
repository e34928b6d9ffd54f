"""Flags that contradict the run are refused before anything starts, and no two services get one port."""

import re

import pytest

from atropos_launcher.commands import evaluate, train
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import no_processes, plan

__all__ = ["no_processes"]
pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--vllm.model org/other", "vllm.model org/other: `model` at the top of the run decides it, which is "),
        ("--vllm.quantization fp8", "vllm.quantization fp8: bridge broadcast "),
        ("--vllm.pipeline-parallel-size 2", "vllm.pipeline_parallel_size 2: a server that gets weights"),
        ("--vllm.data-parallel-size 2", "no such parts: give --vllm.count"),
        ("--vllm.api-server-count 2", "vllm.api_server_count 2: "),
        ("--vllm.host 0.0.0.0", "vllm.host 0.0.0.0 lets other machines in"),
        ("--vllm.host 10.0.0.3", "vllm.host 10.0.0.3: the run's programs reach it at 127.0.0.1"),
        ("--api.host 10.0.0.3 --api.allow-unauthenticated", "api.host 10.0.0.3: the run's programs reach it at"),
        ("--vllm.enable-lora", "vllm.enable_lora true: bridge broadcast "),
        ("--bridge lora --vllm.enable-lora false", "vllm.enable_lora false: bridge lora "),
        ("--bridge lora --vllm.max-lora-rank 8", "vllm.max_lora_rank 8: the adapter has rank 16"),
        ("--bridge single_copy --vllm.dtype half", "vllm.dtype float16: bridge single_copy "),
        ("--vllm.max-num-batched-tokens 32", "max_num_batched_tokens 32 is below max_num_seqs 64, which vLLM refuses"),
        ("--vllm.count 2 --vllm.2.quantization fp8", "vllm.quantization fp8"),
        (
            "--bridge lora --model Qwen/Qwen2.5-0.5B --bridge.target-modules query",
            "this model has no such layer",
        ),
        ("--gpus 4 --layout.trainer 1,1", "layout.trainer: GPU 1 stands twice"),
        ("--gpus 4 --layout.vllm 0,0", "layout.vllm: GPU 0 stands twice"),
        (
            "--gpus 4 --layout.teacher 2,2 --teacher.model org/big-7B --teacher.tensor-parallel-size 2",
            "layout.teacher: GPU 2 stands twice",
        ),
        ("--vllm.max-num-seqs 0", "vllm.max_num_seqs: expected a number of sequences, at least 1, got 0"),
        ("--vllm.dtype int8", "vllm.dtype: expected one of auto, float32, bfloat16, float16, float, half, got 'int8'"),
        ("--api.port abc", "port: expected a port from 1 to 65535, got 'abc'"),
        ("--api.port 0", "port: expected a port from 1 to 65535, got 0"),
        ("--api.port 8000 --vllm.port 8000", "api.port 8000 is a vLLM server's too: give one of them another"),
        ("--trainer.vllm-port 9100", "trainer.vllm_port 9100: the run's vLLM has 9001: give --vllm-port"),
        ("--trainer.atropos-url http://there:1", "trainer.atropos_url http://there:1: the run's API has port 8000"),
        ("--trainer.atropos-url http://there:x", "trainer.atropos_url http://there:x: Port could not be cast"),
        ("--env.rollout_server_url http://there:1", "gsm8k.rollout_server_url http://there:1: the run's API has port"),
        ("--trainer.metrics-port 9001", "trainer.metrics_port 9001 is another service's of this run"),
    ],
)
def test_what_the_run_could_not_use_is_refused(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        train.main(["arithmetic", *flags.split(), "--dry-run"])


@pytest.mark.parametrize(
    "flags",
    [
        "--bridge lora --vllm.quantization fp8 --vllm.max-lora-rank 64 --vllm.enable-lora",
        "--bridge restart --vllm.quantization fp8 --vllm.pipeline-parallel-size 2 --vllm.host 0.0.0.0",
        "--vllm.host localhost --vllm.pipeline-parallel-size 1 --vllm.enable-lora false",
        "--vllm.max-num-batched-tokens 2k --vllm.dtype half",
        "--bridge lora --model Qwen/Qwen2.5-0.5B --bridge.target-modules lm_head,query",
        "--gpus 2 --layout.trainer=",
        "--vllm.max-num-batched-tokens 32 --vllm.max-num-seqs 32",
        "--trainer.vllm-port 9001 --trainer.vllm-host localhost --trainer.atropos-url http://localhost:8000",
        "--env.rollout_server_url http://localhost:8000 --trainer.metrics-port 9100",
    ],
)
def test_what_the_run_can_use_is_not(flags: str) -> None:
    assert train.main(["arithmetic", *flags.split(), "--dry-run"]) == 0


@pytest.mark.parametrize("flags", ["--vllm.enable-lora", "--bridge lora --vllm.enable-lora false"])
def test_the_bridge_that_is_named_for_adapters_or_none_is_accepted(flags: str) -> None:
    words = ["arithmetic", *flags.split(), "--dry-run"]
    with pytest.raises(ConfigError, match="decides it: drop it, or give --bridge") as refused:
        train.main(words)
    assert train.main([*words, "--bridge", str(refused.value).rpartition(" ")[2]]) == 0


def test_a_key_lets_vllm_serve_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k" * 40)
    assert train.main(["arithmetic", "--vllm.host", "0.0.0.0", "--dry-run"]) == 0


def test_an_evaluation_refuses_them_too() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.quantization fp8"):
        evaluate.main(["arithmetic", "--vllm.quantization", "fp8", "--dry-run"])


@pytest.mark.parametrize(
    ("flags", "api", "vllm", "teacher"),
    [
        ("", 8000, [9001], 9002),
        ("--api.port 8100", 8100, [9001], 9002),
        ("--api-port 9001", 9001, [9002], 9003),
        ("--api-port 9002", 9002, [9001], 9003),
        ("--vllm.port 8000", 8001, [8000], 8002),
        ("--vllm.count 2 --api-port 9002", 9002, [9001, 9003], 9004),
    ],
)
def test_a_port_that_is_named_is_nobody_elses(flags: str, api: int, vllm: list[int], teacher: int) -> None:
    made = plan("arithmetic", *flags.split(), "--teacher.model", "org/big-7B", "--trainer.distill-coef", "1")
    assert (made.site.api_port, list(made.site.vllm_ports)) == (api, vllm)
    assert made.site.teacher is not None
    assert made.site.teacher.port == teacher
    assert made.trainer.atropos_url == f"http://127.0.0.1:{api}"
    assert f"port: {api}" in made.files["api.yaml"]
    assert {each.resolved["env"]["rollout_server_url"] for each in made.environments.values()} == {made.site.api}
