"""What the launcher makes of --enable-lora, without starting vLLM."""

import os
from argparse import Namespace

import pytest

from example_trainer.vllm_api_server import (
    LORA_WORKER,
    PROBED_WORKER,
    LaunchError,
    _configure_bridge,
    _keep_kv_cache,
    _with_defaults,
)
from vllm_patching.batch_invariant.switch import SWITCH
from vllm_patching.kv_cache import SALTED


def serve_arguments(**changes: object) -> Namespace:
    settings: dict[str, object] = dict(
        enable_lora=True,
        max_lora_rank=16,
        api_server_count=None,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        host="127.0.0.1",
        quantization=None,
        worker_cls="auto",
        additional_config=None,
        await_sync=False,
    )
    return Namespace(**settings | changes)


def test_a_lora_server_has_room_for_two_versions_and_keeps_cuda_graphs() -> None:
    words = _with_defaults(["--model", "m", "--enable-lora"], cpu=False)
    assert words[words.index("--max-loras") + 1] == "2"
    assert "--enforce-eager" not in words
    chosen = _with_defaults(["--model", "m", "--enable-lora", "--max-loras", "8"], cpu=False)
    assert chosen.count("--max-loras") == 1
    assert "--max-cpu-loras" not in chosen
    assert "--max-loras" not in _with_defaults(["--model", "m"], cpu=False)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_lora_server_takes_adapters_whether_or_not_shared_weights_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shared: str
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", shared)
    caplog.set_level("INFO", logger="vllm")
    arguments = serve_arguments()
    _configure_bridge(arguments, guarded=False)
    assert arguments.worker_cls == LORA_WORKER
    assert arguments.additional_config is None
    assert "LoRA bridge on: adapters up to rank 16" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(host="0.0.0.0"), "give --api-key, or keep --host 127.0.0.1"),
        (dict(api_server_count=2), "drop --api-server-count"),
        (dict(pipeline_parallel_size=2), "--pipeline-parallel-size 2: .* use --tensor-parallel-size"),
    ],
)
def test_a_lora_server_that_others_could_change_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_SHARED_WEIGHTS", raising=False)
    with pytest.raises(LaunchError, match=message):
        _configure_bridge(serve_arguments(**changes), guarded=False)


def test_pipeline_stages_are_refused_before_vllm_starts_for_whole_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has layers that the others lack: the trainer met that late, as a tensor that vLLM does not have."""
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    with pytest.raises(LaunchError, match=r"--pipeline-parallel-size 2: .* use --tensor-parallel-size"):
        _configure_bridge(serve_arguments(enable_lora=False, pipeline_parallel_size=2), guarded=False)


def test_a_server_without_a_bridge_answers_a_trainers_probe_unless_another_worker_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that mode restart starts does."""
    monkeypatch.delenv("VLLM_ENABLE_SHARED_WEIGHTS", raising=False)
    for given, chosen in (("auto", PROBED_WORKER), ("my.Worker", "my.Worker")):
        arguments = serve_arguments(enable_lora=False, worker_cls=given)
        _configure_bridge(arguments, guarded=False)
        assert arguments.worker_cls == chosen


def test_a_server_without_a_bridge_awaits_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_SHARED_WEIGHTS", raising=False)
    with pytest.raises(LaunchError, match="--await-sync without a weight bridge"):
        _configure_bridge(serve_arguments(enable_lora=False, await_sync=True), guarded=False)


@pytest.mark.parametrize(
    ("changes", "exact", "message"),
    [
        (dict(kv_on_sync="keep", enable_lora=False), "1", "--kv-on-sync keep with --batch-invariant: .* drop one of"),
        (dict(kv_on_sync="salt"), "0", "--kv-on-sync salt with --enable-lora: .* each policy version is an adapter"),
    ],
)
def test_a_cache_that_cannot_be_kept_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], exact: str, message: str
) -> None:
    monkeypatch.setenv(SWITCH, exact)
    with pytest.raises(LaunchError, match=message):
        _keep_kv_cache(serve_arguments(**changes))


def test_every_process_of_a_server_learns_that_its_requests_are_salted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.delenv(SALTED, raising=False)
    for kept in ("reset", "keep"):
        _keep_kv_cache(serve_arguments(kv_on_sync=kept, enable_lora=False))
        assert SALTED not in os.environ
    monkeypatch.setenv(SALTED, "0")
    _keep_kv_cache(serve_arguments(kv_on_sync="salt", enable_lora=False))
    assert os.environ[SALTED] == "1"
