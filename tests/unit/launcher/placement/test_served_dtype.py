"""The dtype that vLLM serves by default and by `--dtype auto`, on a GPU and on processors with and without bfloat16."""

from pathlib import Path

import pytest

from atropos_launcher.placement import gpus, this_machine
from tests.unit.launcher.plans import no_processes, on_gpus, plan

__all__ = ["no_processes"]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("words", "visible", "multiplies", "served"),
    [
        (["quickstart"], [], True, "bfloat16"),
        (["quickstart"], [], False, "float32"),
        (["quickstart"], ["0"], False, "bfloat16"),
        (["quickstart", "--dtype", "float32"], [], True, "float32"),
        (["quickstart", "--batch-invariant"], [], True, "float32"),
        (["quickstart", "--deterministic"], [], True, "float32"),
        (["quickstart", "--dataset", "gsm8k"], [], True, "bfloat16"),
        (["quickstart", "--bridge", "single_copy", "--tp-size", "2"], ["0", "1"], True, "float32"),
        (["arithmetic"], [], True, "float32"),
        (["arithmetic", "--dtype", "auto"], [], True, "bfloat16"),
    ],
)
def test_vllm_serves(
    words: list[str], visible: list[str], multiplies: bool, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, visible)
    monkeypatch.setattr(gpus, "multiplies_bfloat16", lambda: multiplies)
    (command,) = [service.command for service in plan(*words).services if service.name == "vllm"]
    assert command[command.index("--dtype") + 1] == served


@pytest.mark.parametrize(
    ("cpuinfo", "multiplies"),
    [
        ("model name\t: EPYC\nflags\t\t: fpu avx2 avx512f\n\nflags\t\t: fpu\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_linux_tells_whether_the_processor_multiplies_bfloat16(
    cpuinfo: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: cpuinfo)
    assert this_machine.multiplies_bfloat16() is multiplies
