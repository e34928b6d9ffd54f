"""The launcher's own flags, parsed together with vLLM's by vLLM's own parser."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from example_trainer import vllm_api_server
from example_trainer.vllm_api_server import _given, _with_defaults, own_flags
from vllm_patching import free_memory
from vllm_patching.compat import vllm_flags, vllm_server
from vllm_patching.http.gate import ENGINE_DEADLINE_S

pytestmark = pytest.mark.services  # importing vLLM looks at the processor by a process


def test_own_flags_and_those_of_vllm_share_one_namespace() -> None:
    flags = ["--model", "m", "--engine_deadline_s=2.5", "--batch-invariant", "--max-num-seqs", "3"]
    args = vllm_server.parse_serve_arguments(flags, own_flags())
    assert (args.engine_deadline_s, args.batch_invariant, args.max_num_seqs, args.model) == (2.5, True, 3, "m")
    default = vllm_server.parse_serve_arguments(["--model", "m"], own_flags())
    assert (default.engine_deadline_s, default.batch_invariant) == (ENGINE_DEADLINE_S, False)


def test_the_flags_read_from_the_source_are_those_that_vllm_parses() -> None:
    parsed = vars(vllm_server.parse_serve_arguments(["--model", "m"], own_flags())).keys() - {"subparser", "model_tag"}
    known = vllm_flags.installed_flags().union(vllm_flags.flags_in(Path(vllm_api_server.__file__)))
    assert parsed - known == set()
    assert len(known) < len(parsed) + 40


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_deadline_that_is_no_positive_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        vllm_server.parse_serve_arguments(["--model", "m", f"--engine-deadline-s={text}"], own_flags())
    assert ended.value.code == 2
    assert "--engine-deadline-s" in capsys.readouterr().err.splitlines()[-1]


def served(*flags: str) -> Any:
    """What vLLM reads from these flags and our defaults for CPUs."""
    return vllm_server.parse_serve_arguments(_with_defaults(["--model", "m", *flags], cpu=True), own_flags())


@pytest.fixture
def _kv_cache_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.usefixtures("_kv_cache_is_given")
def test_a_flag_that_is_denied_is_no_default() -> None:
    assert served().enforce_eager
    assert not served("--no-enforce-eager").enforce_eager
    assert not served("--no_enforce_eager").enforce_eager


@pytest.mark.usefixtures("_kv_cache_is_given")
def test_a_file_of_settings_wins_over_defaults_and_the_command_line_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("port: 8123\ndtype: bfloat16\nenforce-eager: false\nblock_size: 64\nmax-loras: []\n")
    args = served("--config", str(path), "--block-size", "16")
    assert (args.port, args.dtype, args.enforce_eager, args.block_size) == (8123, "bfloat16", False, 16)
    assert (args.host, args.logprobs_mode) == ("127.0.0.1", "processed_logprobs")
    path.write_text("enable_lora: true\nbatch-invariant: true\nhost: false\n")
    args = served("--config", str(path))
    assert (args.enable_lora, args.max_loras, args.max_cpu_loras, args.host) == (True, 2, 4, "127.0.0.1")
    assert "--batch-invariant" in _given(["--config", str(path)])


def test_the_kv_cache_fits_into_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"max": 9 << 30, "current": 1 << 29, "stat": "inactive_file 0"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    _with_defaults([], cpu=True)
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize("content", [b"\xff", b"a: [", b"- port", b""])
def test_a_file_of_settings_that_cannot_be_read_is_left_to_vllm(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_bytes(content)
    assert _given(["--config", str(path)]) == {"--config"}
    assert _given(["--config", "/nowhere.yaml"]) == {"--config"}
    assert _given(["--model", "--config"]) == {"--config", "--model"}
