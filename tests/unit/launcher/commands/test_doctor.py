"""The doctor's judgements one by one, and its command on this machine, before a run and beside a server."""

import json
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atropos_launcher.checks import checks, device_checks
from atropos_launcher.checks.checks import Answer, Finding
from atropos_launcher.checks.gpu_record import RECORD as RECORD_FILE
from atropos_launcher.checks.gpu_record import GpuRecord, read_gpu_record, write_gpu_record
from atropos_launcher.checks.model_files import Model, read_model
from atropos_launcher.commands import doctor
from atropos_launcher.placement import gpus as layout
from atropos_launcher.placement.this_machine import (
    MIB,
    Gpu,
    Listener,
    declared_by,
    find_compiler,
    peer_access,
    python_header,
)
from atroposlib.extras import install
from atroposlib.wire.bridge import Manifest, lay_out
from example_trainer.memory.model_size import published
from example_trainer.memory.plan import GB, GIB
from example_trainer.settings.bridges import MODES
from tests.serving import Asked, Reply, ThreadedServer, free_port

ROOT = Path(__file__).resolve().parents[4]
OTHER = Listener(7, "python -m http.server")
MODEL = Model("mine", {"embed.weight": (1000, 1000), "norm.weight": (1000,)}, heads=9, kv_heads=3)  # 1.001 M parameters
SPLIT = Model("Qwen2.5-0.5B", published("Qwen2.5-0.5B").shapes, heads=14, kv_heads=2)
STATUS = {
    "enabled": True,
    "tp_size": 1,
    "policy_version": 3,
    "poisoned": None,
    "trainer": None,
    "lease_left_s": None,
    "model": "mine",
}
GPUS = [Gpu(0, "H200", 100 * GIB), Gpu(1, "H200", 10 * MIB)]
H200 = Gpu(0, "H200", 80 * GIB)
LARGE = Model("large", {"embed.weight": (200_000, 100_000)}, heads=8, kv_heads=8)  # 40 GB in bfloat16
NAMES = ["NVIDIA H200, 580.65.06", "NVIDIA H100, 580.65.06"]
RECORD = GpuRecord(NAMES, "2026-01-02", "0.33.0", passed=16, failed=[], skipped=1, table="table.md")
TOPOLOGY = """\
 \t\x1b[4mGPU0\tGPU1\tGPU2\x1b[0m\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tOK\t
 GPU2\tCNS\tOK\tX\t

Legend:
  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def manifest(rows: int = 1000) -> Manifest:
    parts = [
        (name, [(name, shape, "float32")])
        for name, shape in {"embed.weight": (rows, 1000), "norm.weight": (1000,)}.items()
    ]
    tensors = tuple(lay_out(parts))
    return Manifest("served", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


def server(mode: str, status: Answer, listener: Listener | None = OTHER, local: bool = True) -> Finding:
    return checks.check_server(MODES[mode], "localhost:9001", local, listener, status)


@pytest.mark.parametrize(
    ("finding", "fragment"),
    [
        (checks.check_python((3, 10)), "3.10, needs 3.11"),
        (
            checks.check_package("torch", None, "2.6"),
            f"needs 2.6 or newer: {install('trainer')}, or",
        ),
        (checks.check_package("vllm", "0.25.1", "0.26", "0.34"), "0.25.1, needs 0.26 or newer, below 0.34"),
        (checks.check_package("vllm", "0.34.0", "0.26", "0.34"), "0.34.0, needs 0.26 or newer, below 0.34"),
        (
            checks.check_plugins({"one": ["atroposlib", "atropos"], "two": ["atropos", "atroposlib"]}),
            "declared by atroposlib and by atropos: pip uninstall atropos atroposlib, then install",
        ),
        (checks.check_plugins({"one": ["atroposlib"], "two": []}), "two not installed: run scripts/setup.sh"),
        (
            checks.check_driver("550.90.07", "12.4", "13.0"),
            "driver 550.90.07 (CUDA 12.4), PyTorch built for CUDA 13.0, which needs 580 or newer: update the driver",
        ),
        (checks.check_driver("575.57.08", None, "13.0"), "driver 575.57.08 (CUDA unknown), PyTorch built"),
        (checks.check_driver("580.65.06", "13.0", None), "PyTorch is a CPU build: run scripts/setup.sh --gpu"),
        (checks.check_compiler(None, Path(__file__)), "install gcc, or set CC to yours"),
        (
            checks.check_compiler("/usr/bin/gcc", Path("/nowhere/Python.h")),
            "/usr/bin/gcc, but not /nowhere/Python.h, which Triton includes: install Python's headers (python3-dev",
        ),
        (checks.check_open_files(256, 256), "at most 256, needs 1024: ulimit -n 65535"),
        (checks.check_allocator(True, 1, "expandable_segments:True", ""), "unset expandable_segments"),
        (checks.check_allocator(True, 1, "", "vllm --enable-sleep-mode"), "restart vLLM without it"),
        (checks.check_master("nowhere", None, []), "nowhere has no address here"),
        (
            checks.check_master("localhost", "127.0.0.1", ["node2"]),
            "localhost is 127.0.0.1, which node2 cannot reach",
        ),
        (
            checks.check_hosts(["node2"], shared_memory=True),
            "node2: one copy is shared within a machine: drop the remote hosts",
        ),
        (
            checks.check_api(8000, OTHER, Answer(404)),
            "in use by python -m http.server (pid 7): end that process, or choose another --api-port",
        ),
        (checks.check_api(8000, OTHER, Answer(200, {"message": "else"})), "in use by python -m http.server"),
        (checks.check_master_port(29500, OTHER), "29500 is in use by python -m http.server (pid 7)"),
        (server("broadcast", Answer(0)), "does not answer: wait for it to load, end it, or choose --vllm-port"),
        (server("broadcast", Answer(0), None, local=False), "nobody answers: start vLLM there"),
        (server("broadcast", Answer(401)), "vLLM refuses the key: set VLLM_API_KEY"),
        (
            server("broadcast", Answer(404)),
            "no /v1/bridge there (404): start it with example_trainer/vllm_api_server.py",
        ),
        (
            server("single_copy", Answer(200, STATUS | {"enabled": False})),
            "without the weight bridge: restart it with VLLM_ENABLE_SHARED_WEIGHTS=1",
        ),
        (
            server("broadcast", Answer(200, STATUS | {"trainer": "host:9", "lease_left_s": 12.0})),
            "trainer host:9 holds the bridge for another 12 s",
        ),
        (server("restart", Answer(200, STATUS)), "in this mode the trainer starts vLLM itself"),
        (
            server("lora", Answer(200, STATUS)),
            "vLLM accepts no adapters: restart it with --enable-lora --max-lora-rank 16",
        ),
        (
            server("broadcast", Answer(200, STATUS | {"max_lora_rank": 16})),
            "accepts only adapters: restart it without --enable-lora",
        ),
        (checks.check_ranks(2, 1), "--tensor-parallel-size 2, but vLLM runs with 1"),
        (
            checks.check_same_model(MODEL, manifest(rows=999)),
            "embed.weight: vLLM holds [999, 1000], the trainer [1000, 1000]",
        ),
        (
            device_checks.check_heads(2, MODEL),
            "9 heads and 3 key-value heads cannot be split into 2: --tensor-parallel-size one of 1, 3, 9",
        ),
        (
            device_checks.check_gpus(MODES["broadcast"], 3, 2),
            "2 visible, 3 rank(s) of vLLM and the trainer: --tensor-parallel-size 2",
        ),
        (device_checks.check_cores(3, 2), "2 for 3 rank(s) of vLLM: --tensor-parallel-size 2 at most"),
        (
            device_checks.check_cores(2, 3, servers=2),
            "3 for 2 rank(s) of each of 2 servers of vLLM: --tensor-parallel-size 1 at most",
        ),
        (
            device_checks.check_gpus(MODES["broadcast"], 2, 3, servers=2),
            "3 visible, 2 rank(s) of each of 2 servers of vLLM and the trainer: --tensor-parallel-size 1, or widen",
        ),
        (
            device_checks.check_gpus(MODES["broadcast"], 1, 2, servers=3),
            "2 visible, 1 rank(s) of each of 3 servers of vLLM and the trainer: 2 server(s), or widen",
        ),
        (
            checks.check_several(MODES["reload"], 2),
            "2, but reload (--weight-bridge-mode reload) supports only one: name one, or choose mode broadcast",
        ),
        (
            device_checks.check_memory(3 * GIB, MODES["broadcast"], MODEL, "float32", GIB, False, servers=2),
            "3.0 GiB available, 6.5 GiB needed",
        ),
        (device_checks.check_shared_memory(64 * MIB, True), "64 MiB free, 464 MiB needed"),
        (device_checks.check_shared_memory(64 * MIB, True, nccl=True), "64 MiB free, 464 MiB needed: mount -o remount"),
        (
            device_checks.check_gpu_memory([H200] * 2, MODES["broadcast"], LARGE, "bfloat16", 1, False),
            "vLLM needs 82.0 GB on each of 1 GPU(s), 40.0 GB of it for the staging buffer, but a GPU has 85.9 GB of",
        ),
        (
            device_checks.check_memory(3 * GIB, MODES["broadcast"], MODEL, "float32", GIB, False),
            "3.0 GiB available, 4.2 GiB needed",
        ),
        (
            device_checks.check_gpu_memory(GPUS, MODES["broadcast"], MODEL, "bfloat16", 1, True),
            "needs 1.5 GB on GPU 1 (H200), and 11 MB are free",
        ),
        (
            device_checks.check_disk(MIB, MODEL, MODES["restart"], "/data"),
            "1 MiB free in /data, two checkpoints and what the bridge writes take 31 MiB",
        ),
    ],
)
def test_what_would_break_a_run_fails_with_value_limit_and_remedy(finding: Finding, fragment: str) -> None:
    assert finding.level == "fail"
    assert finding.remedy
    assert fragment in str(finding)


@pytest.mark.parametrize(
    ("host", "level", "fragment"),
    [
        (60 * GB, "fail", "vLLM needs 65.5 GB of host memory for --bridge-staging host, and 60.0 GB are free: give"),
        (580 * GB, "fail", "GB are free"),
        (600 * GB, "ok", "KV cache 512 MiB; and 61.0 GiB of host memory, page-locked"),
    ],
)
def test_staging_in_host_memory_is_counted_there(
    host: int, level: str, fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32B on two GPUs of 80 GB: 65.5 GB in bfloat16, and 524 GB of states that are offloaded."""
    monkeypatch.setattr(layout, "available_memory", lambda: host)
    model = Model("Qwen2.5-32B", published("Qwen2.5-32B").shapes, heads=40, kv_heads=8)
    gpus = [Gpu(index, "H100", 80 * GB) for index in range(2)]
    found = device_checks.check_gpu_memory(gpus, MODES["broadcast"], model, "bfloat16", 1, False, staging_on_host=True)
    assert (found.level, fragment in str(found)) == (level, True), str(found)


@pytest.mark.parametrize(
    "finding",
    [
        checks.check_driver(None, None, "13.0"),
        checks.check_driver("525.60.13", None, "11.8"),
        checks.check_proven(None, NAMES),
        checks.check_proven("gpu-check.json cannot be read: invalid", NAMES),
        checks.check_proven(RECORD, ["NVIDIA H200, 590.10"]),
        checks.check_proven(RECORD, NAMES[:1]),
        checks.check_proven(msgspec.structs.replace(RECORD, failed=["reload"]), NAMES),
        device_checks.check_shared_memory(512 * MIB, True, nccl=True),
        device_checks.check_peers([H200, GPUS[1]], {}),
        device_checks.check_peers([H200, GPUS[1]], {(0, 1): "CNS", (1, 0): "CNS"}),
        checks.check_open_files(1024, 20_000),
        checks.check_switch(MODES["broadcast"], "", running=False),
        device_checks.check_gpus(MODES["broadcast"], 1, 1),
        server("broadcast", Answer(200, STATUS | {"poisoned": "commit failed"})),
    ],
)
def test_what_runs_less_well_is_a_warning_with_a_remedy(finding: Finding) -> None:
    assert finding.level == "warn"
    assert finding.remedy


@pytest.mark.parametrize(
    "finding",
    [
        checks.check_python((3, 11)),
        checks.check_package("vllm", "0.33.1", "0.26", "0.34"),
        checks.check_plugins({"one": ["atroposlib"], "two": ["atroposlib"]}),
        checks.check_driver("590.10", "13.1", "13.0"),
        checks.check_driver("550.90.07", "13.0", "13.0"),  # by NVIDIA's forward compatibility
        checks.check_driver("580.65.06", None, "13.0"),
        checks.check_compiler("/usr/bin/gcc", Path(__file__)),
        checks.check_proven(RECORD, NAMES[::-1]),
        device_checks.check_shared_memory(GIB, True, nccl=True),
        device_checks.check_peers([H200, GPUS[1]], {(0, 1): "OK", (1, 0): "OK"}),
        checks.check_open_files(1024, 65_535),
        checks.check_switch(MODES["broadcast"], "1", running=False),
        checks.check_switch(MODES["restart"], "", running=False),
        checks.check_allocator(False, 1, "expandable_segments:True", ""),
        checks.check_allocator(True, 0, "expandable_segments:True", ""),
        checks.check_master("localhost", "127.0.0.1", []),
        checks.check_hosts([], True),
        checks.check_api(8000, None, Answer(0)),
        checks.check_api(8000, OTHER, Answer(200, {"message": "AtroposLib API"})),
        checks.check_master_port(0, None),
        server("broadcast", Answer(200, STATUS)),
        server("broadcast", Answer(0), None),
        server("restart", Answer(0), None),
        server("lora", Answer(200, STATUS | {"max_lora_rank": 16, "enabled": False})),
        checks.check_ranks(2, 2),
        checks.check_same_model(MODEL, manifest()),
        device_checks.check_heads(3, MODEL),
        device_checks.check_gpus(MODES["single_copy"], 2, 2),
        device_checks.check_shared_memory(64 * MIB, False),
        device_checks.check_memory(4 * GIB, MODES["broadcast"], MODEL, "float32", GIB, running=True),
        device_checks.check_gpu_memory(GPUS[:1], MODES["single_copy"], MODEL, "bfloat16", 1, False),
    ],
)
def test_what_is_right_is_ok(finding: Finding) -> None:
    assert finding.level == "ok"
    assert not finding.remedy


def test_a_cpu_has_memory_for_every_rank_of_trainer_and_vllm() -> None:
    def needed(mode: str = "broadcast", **ranks: int) -> float:
        found = device_checks.check_memory(GIB, MODES[mode], SPLIT, "float32", GIB, False, **ranks)
        return float(str(found.found).partition("GiB available, ")[2].split()[0])

    alone = needed()
    assert needed(tensor_parallel=2) == pytest.approx(alone + 1, abs=0.11)  # its KV cache
    assert needed(tp=2) > alone + 0.2  # logits of each rank
    by_ranks = needed("single_copy", tensor_parallel=2, tp=2) - needed("single_copy", tensor_parallel=2)
    assert by_ranks < 0.5 * needed("single_copy")  # they share the weights, gradients and moments


@pytest.mark.parametrize(
    ("tp", "ranks", "dtype", "rows", "shown"),
    [
        (2, 4, "float32", 128, "fail 2 trainer ranks .* vLLM, which has 4: --tp-size 4, or --tp-size 1"),
        (2, 1, "float32", 128, "fail 2 trainer ranks .* vLLM, which has 1: --tp-size 1"),
        (
            2,
            2,
            "bfloat16",
            128,
            "fail .* train float32 weights, and vLLM serves bfloat16: serve with --dtype float32, or .*",
        ),
        (2, 2, "float32", 100, "fail .* of 100 tokens: --mode broadcast, or --tp-size 1"),
        (2, 2, "float32", 128, "ok 2 trainer ranks, each over the memory of a rank of vLLM"),
    ],
)
def test_a_single_copy_by_ranks_is_judged_as_the_trainer_judges_it(
    tp: int, ranks: int, dtype: str, rows: int, shown: str
) -> None:
    model = Model("mine", {"model.embed_tokens.weight": (rows, 64)}, heads=4, kv_heads=2)
    found = device_checks.check_by_ranks(tp, ranks, dtype, model)
    assert re.fullmatch(shown, f"{found.level} {found.found}" + (f": {found.remedy}" if found.remedy else ""))


def test_a_family_that_the_trainer_cannot_split_is_named() -> None:
    found = device_checks.check_trainer_split(2, replace(SPLIT, model_type="phi3"))
    assert (found.level, found.remedy) == ("fail", "give --tp-size 1, and share its weights by --fsdp-size")
    assert "is a phi3" in found.found
    assert device_checks.check_trainer_split(2, replace(SPLIT, model_type="qwen2")).level == "ok"


def test_the_driver_s_matrix_is_read_pair_by_pair() -> None:
    found = peer_access(TOPOLOGY)
    assert found == {(0, 1): "OK", (0, 2): "CNS", (1, 0): "OK", (1, 2): "OK", (2, 0): "CNS", (2, 1): "OK"}
    assert peer_access(None) == peer_access("\tGPU0\n GPU0\tX\n") == {}
    finding = device_checks.check_peers([Gpu(index, "H200", GIB) for index in range(3)], found)
    assert finding.found == "GPU 0 and 2: CNS"
    assert device_checks.check_peers([Gpu(index, "H200", GIB) for index in (1, 2)], found).level == "ok"


def test_the_compiler_is_the_one_that_triton_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler(None) is None
    for name in ("clang", "gcc", "icc"):
        (tmp_path / name).touch(0o755)
        assert find_compiler(None) == str(tmp_path / ("clang" if name == "clang" else "gcc"))
    assert find_compiler("icc") == str(tmp_path / "icc")
    assert find_compiler("nvc") is None
    assert python_header().name == "Python.h"


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / RECORD_FILE
    assert read_gpu_record(path) is None
    write_gpu_record(path, RECORD)
    assert read_gpu_record(path) == RECORD
    path.write_text('{"gpus": 3}')
    found = read_gpu_record(path)
    assert isinstance(found, str)
    assert str(path) in found


SMI = """#!/bin/sh
case "$*" in
*driver_version*) echo "NVIDIA H200, 570.10"; echo "NVIDIA H200, 570.10" ;;
*memory.free*) echo "0, GPU-a, NVIDIA H200, 80000"; echo "1, GPU-b, NVIDIA H200, 80000" ;;
*p2p*) printf ' \\tGPU0\\tGPU1\\n GPU0\\tX\\tNS\\n GPU1\\tNS\\tX\\n' ;;
*) echo "CUDA Version: 12.8" ;;
esac
"""


@pytest.mark.services
def test_a_machine_with_gpus_is_checked_and_one_without_hears_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_of_gpus = ("C compiler", "gpu-check", "peer access", "  CUDA  ")
    (smi := tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "13.0")
    doctor.main([])
    shown = capsys.readouterr().out
    assert not [word for word in only_of_gpus if word in shown]
    smi.write_text(SMI)
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "fail  CUDA            driver 570.10 (CUDA 12.8), PyTorch built for CUDA 13.0, which needs 580" in shown
    assert "warn  peer access     GPU 0 and 1: NS" in shown
    assert "warn  gpu-check       never ran on this machine" in shown
    write_gpu_record(tmp_path / RECORD_FILE, msgspec.structs.replace(RECORD, gpus=["NVIDIA H200, 570.10"] * 2))
    doctor.main([])
    assert "ok    gpu-check       16 passed, 0 failed, 1 skipped on 2026-01-02, vLLM 0.33.0" in capsys.readouterr().out


def write_model(folder: Path, tied: bool) -> Path:
    """A checkpoint of headers: the doctor reads no weights."""
    tensors = {
        "model.embed_tokens.weight": [10, 4],
        "lm_head.weight": [10, 4],
        "model.layers.0.self_attn.rotary_emb.inv_freq": [2],
    }
    header = json.dumps(
        {"__metadata__": {}} | {name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, "tie_word_embeddings": tied}))
    return folder


def test_the_doctor_looks_at_the_plugins_that_are_declared_and_who_declares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(doctor.PLUGINS) == {name for group in plugins.values() for name in group}
    for name in ("one", "another"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmine = mine:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(declared_by("mine")) == ["another", "one"]
    assert declared_by("nobody_declares_this") == []


@pytest.mark.parametrize(
    ("tied", "names"), [(True, {"model.embed_tokens.weight"}), (False, {"model.embed_tokens.weight", "lm_head.weight"})]
)
def test_a_checkpoint_is_read_by_its_headers(tmp_path: Path, tied: bool, names: set[str]) -> None:
    model = read_model(str(write_model(tmp_path, tied)))
    assert model is not None
    assert set(model.shapes) == names
    assert model.parameters == 40 * len(names)
    assert model.kv_heads == 4


def test_a_model_that_is_not_here_is_no_model() -> None:
    assert read_model("nobody/has-this-model") is None
    assert read_model("/nowhere") is None


def run_doctor(*flags: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "scripts/bridge_doctor.sh", *flags],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "ATROPOS_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def vllm_port() -> Iterator[int]:
    """The two bridge routes of a server that asks for a key."""

    def answer(asked: Asked) -> Reply:
        content: dict[str, Any] = STATUS if asked.path.endswith("/status") else msgspec.to_builtins(manifest())
        allowed = asked.headers["Authorization"] == "Bearer right"
        return Reply(200 if allowed else 401, json.dumps(content).encode(), {"content-type": "application/json"})

    with ThreadedServer(answer) as http:
        yield http.port


@pytest.mark.services
def test_a_running_server_is_asked_with_the_key_and_compared(vllm_port: int, tmp_path: Path) -> None:
    model = str(write_model(tmp_path, tied=True))
    code, shown = run_doctor(
        "--mode", "broadcast", "--vllm-port", str(vllm_port), "--model", model, VLLM_API_KEY="right"
    )
    assert code == 1
    assert f"ok    localhost:{vllm_port}" in shown
    assert "vLLM serves policy version 3 with TP=1" in shown
    assert "fail  same model" in shown
    assert "vLLM holds embed.weight [1000, 1000], the trainer does not" in shown
    code, shown = run_doctor("--mode", "broadcast", "--vllm-port", str(vllm_port), VLLM_API_KEY="wrong")
    assert code == 1
    assert "vLLM refuses the key" in shown


@pytest.mark.services
@pytest.mark.parametrize("body", [b"<html></html>", b"[]", b"{}", b'{"model": 3}'])
def test_another_programs_web_server_is_called_one(body: bytes) -> None:
    kind = "text/html" if body.startswith(b"<") else "application/json"
    with ThreadedServer(lambda asked: Reply(200, body, {"content-type": kind})) as http:
        code, shown = run_doctor("--mode", "broadcast", "--vllm-port", str(http.port))
    assert code == 1
    assert "no /v1/bridge there (200)" in shown
    assert "Traceback" not in shown


@pytest.mark.services
@pytest.mark.slow
def test_a_held_port_is_named_with_its_holder_and_ends_with_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        code, shown = run_doctor("--mode", "restart", "--api-port", str(held.getsockname()[1]))
    assert code == 1
    assert "needed by the batching API, in use by" in shown
    assert "fix what failed" in shown


@pytest.mark.services
def test_servers_that_contradict_the_hosts_file_fail(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1:1\n127.0.0.2:1\n")
    flags = ["--mode", "broadcast", "--hosts-file", str(tmp_path / "hosts")]
    code, shown = run_doctor(*flags, NUM_INFERENCE_NODES="1")
    assert code == 1
    assert "names 2 host(s), but NUM_INFERENCE_NODES is 1" in shown
    assert "127.0.0.2:1" in run_doctor(*flags, NUM_INFERENCE_NODES="2")[1]


@pytest.mark.services
def test_every_line_says_its_level_and_the_last_counts_them() -> None:
    port = str(free_port())
    code, shown = run_doctor("--mode", "single_copy", "--vllm-port", port, VLLM_ENABLE_SHARED_WEIGHTS="1")
    *lines, last = shown.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "fail"}
    failed = sum(line.startswith("fail") for line in lines)
    assert last.startswith(f"{len(lines)} checks, {failed} failed")
    assert code == (1 if failed else 0)


@pytest.mark.services
def test_a_wrong_mode_is_one_line_and_status_2() -> None:
    code, shown = run_doctor("--mode", "broadcasts")
    assert code == 2
    assert len(shown.splitlines()) == 1
    assert "got 'broadcasts'" in shown
