"""Without a GPU the plan knows the machine's memory, too: what does not fit is refused before anything is downloaded,
and nothing is offered that would be.
"""

import re
import shutil
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.console.summary import LARGER, next_steps
from atropos_launcher.placement import gpus
from atropos_launcher.plan import site
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import ROOT, ask_for, no_processes, plan  # noqa: F401  a fixture
from vllm_patching import free_memory

GB = 10**9
SMALL = Path.home() / ".cache/atropos"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_processes: None) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site, "find_model", lambda model, flag="--model": model or "SmolLM2-135M-Instruct")
    has(monkeypatch, 24)
    has_disk(monkeypatch, 1000)


def has_disk(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """The disk has this many GB free."""
    usage = shutil.disk_usage("/")._replace(free=int(free * GB))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)


def has(monkeypatch: pytest.MonkeyPatch, size: float, free: float | None = None) -> None:
    """The machine has this many GB, of which all but 1.5, or `free`, are free."""
    monkeypatch.setattr(gpus, "total_memory", lambda: int(size * GB))
    monkeypatch.setattr(gpus, "available_memory", lambda: int((size - 1.5 if free is None else free) * GB))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "quickstart --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k",
            r"takes about 61\.5 GB of memory, and this machine has 24\.0 GB: give --bridge lora"
            r" --trainer.gradient-checkpointing, or use a smaller model",
        ),
        ("gsm8k Qwen/Qwen2.5-7B-Instruct", r"this machine has 24\.0 GB: use a smaller model"),
    ],
)
def test_what_does_not_fit_a_machine_without_a_gpu_is_refused_with_what_would(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=says):
        train.main([*words.split(), "--dry-run"])
    assert "  in all " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "gsm8k Qwen/Qwen2.5-0.5B-Instruct --vllm.tensor-parallel-size 4",
            "vLLM's --tensor-parallel-size 4 does not divide the 14 attention heads of this model: give one of 1, 2",
        ),
        (
            "arithmetic Qwen/Qwen2.5-0.5B --trainer.distill-coef 1 --teacher.model Qwen/Qwen2.5-0.5B-Instruct"
            " --teacher.tensor-parallel-size 4",
            "the teacher's --tensor-parallel-size 4 does not divide the 14 attention heads of this model: give one of",
        ),
    ],
)
def test_a_split_that_vllm_refuses_is_refused_without_a_gpu_too(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, 64)
    with pytest.raises(ConfigError, match=says):
        train.main([*words.split(), "--dry-run"])


@pytest.mark.parametrize(
    ("dtype", "told"),
    [("float32", "float32"), ("float", "float32"), ("half", "float16"), ("auto", "bfloat16"), (None, "bfloat16")],
)
def test_memory_is_planned_in_the_dtype_of_a_server(
    dtype: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a 7B model 15.231 GB in 16 bits, and in 32 bits twice as much."""
    argv = ["gsm8k", "Qwen/Qwen2.5-7B-Instruct", "--dry-run", "--gpus", "2x80", "--bridge", "lora"]
    argv += ["--teacher.url", "http://127.0.0.1:9009", "--trainer.distill-coef", "1"]
    assert train.main([*argv, *(() if dtype is None else ("--vllm.dtype", dtype))]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "vLLM: weights in" in line]
    assert line.split()[-4:] == ["in", told, "30.462" if told == "float32" else "15.231", "GB"]


def test_the_plan_has_each_server_in_its_own_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["two_servers", "Qwen/Qwen2.5-0.5B", "--vllm.2.dtype", "bfloat16", "--dry-run"]
    assert train.main([*words, "--host-memory", "64"]) == 0
    assert train.main([*words, "--gpus", "4x80", "--vllm.1.dtype", "float32"]) == 0
    told = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if " weights in " in line]
    ours = [words[:-2] for words in told if words[0] != "weights" and words[0] != "trainer:"]
    assert ours[:2] == [["vllm-1:", "weights", "in", "float32"], ["vllm-2:", "weights", "in", "bfloat16"]]
    assert ours[2:] == [["vLLM:", "weights", "in", "float32"], ["vLLM:", "weights", "in", "bfloat16"]]


def test_a_teacher_takes_of_the_machine_that_it_is_started_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ["arithmetic", "Qwen/Qwen2.5-0.5B", "--dry-run"]
    words = [*alone, "--trainer.distill-coef", "1", "--teacher.model", "Qwen/Qwen2.5-7B-Instruct"]
    has(monkeypatch, 64)
    assert train.main(words) == 0
    assert re.search(r"teacher: weights in float32 +30\.462 GB", capsys.readouterr().out)
    has(monkeypatch, 64, free=32)
    assert train.main(alone) == 0
    assert "Memory may not suffice" not in capsys.readouterr().out
    assert train.main(words) == 0
    assert "Memory may not suffice" in capsys.readouterr().out
    has(monkeypatch, 32)
    with pytest.raises(ConfigError, match=r"beside its teacher here takes about .*: use a smaller model or teacher"):
        train.main(words)


@pytest.mark.parametrize("size", [64, 24])
def test_the_remedy_is_accepted(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, size)
    for model in ("0.5B", "1.5B", "3B", "7B"):
        words = ["gsm8k", f"Qwen/Qwen2.5-{model}-Instruct", "--dry-run"]
        try:
            train.main(words)
        except ConfigError as error:
            if way := re.search(r"give (.*), or", str(error)):
                assert train.main([*words, *way[1].split()]) == 0


@pytest.mark.parametrize(("size", "larger"), [(64, LARGER[0]), (24, LARGER[1]), (16, None), (8, None)])
def test_a_newcomer_is_offered_what_the_machine_accepts(
    size: float, larger: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, size)
    offered = next_steps("runs/mine", newcomer=True, typed="atropos", accepts=train.is_accepted)
    assert [words for words in offered if "Qwen" in words] == ([] if larger is None else [f"atropos {larger}"])
    for command in offered:
        if "Qwen" in command or "lora" in command:
            assert train.is_accepted(command.removeprefix("atropos ")), command


@pytest.mark.parametrize("size", [8, 16, 24, 64])
def test_a_command_of_the_readme_is_accepted_on_a_laptop_of_the_memory_that_it_names(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, size)
    rows = (ROOT / "README.md").read_text()
    (memory,) = re.findall(r"(\d+) GB of memory", rows)
    found = {"quickstart": int(memory)} | {
        words.replace("run_", "train ").replace(".sh", ""): int(needs)
        for words, needs in re.findall(r"`scripts/(run_[^`]+)`, in (\d+) GB", rows)
    }
    assert len(found) == 2
    for words, needs in found.items():
        argv = words.removeprefix("train ").split()
        if size >= needs:
            assert train.main([*argv, "--dry-run"]) == 0
        else:
            with pytest.raises(ConfigError, match=rf"this machine has {size:.1f} GB"):
                train.main([*argv, "--dry-run"])


def test_a_laptop_of_8_gb_is_told_how_it_can_run_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 8)
    with pytest.raises(ConfigError, match=r"give --bridge lora --trainer\.gradient-checkpointing") as refused:
        train.main(["quickstart", "--dry-run"])
    assert "this machine has 8.0 GB" in str(refused.value)
    assert train.main(["quickstart", "--dry-run", "--bridge", "lora", "--trainer.gradient-checkpointing"]) == 0


def test_too_little_free_memory_is_said_by_a_dry_run_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has(monkeypatch, 24, free=6)
    asked, made = ask_for("quickstart"), plan("quickstart")
    train.expect_fit(made, asked)
    said = train.scarcity(made, asked) or ""
    assert "GB, and 6.0 GB are free now. End other programs" in said
    assert train.main(["quickstart", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(f"\n#\n# {said}\n")
    has(monkeypatch, 24)
    assert train.scarcity(made, asked) is None
    assert train.main(["quickstart", "--dry-run"]) == 0
    assert "are free now" not in capsys.readouterr().out


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    machine = free_memory.total_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.total_memory() == machine
    (tmp_path / "memory.max").write_text("3000000\n")
    assert free_memory.total_memory() == 3_000_000


def test_checkpoints_that_the_disk_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 135 M weights: a state is 1.6 GB, and the last model, the best and its successor are 0.5 GB each."""
    for free, words, fits in (
        (1.6, "quickstart", False),
        (1.7, "quickstart", True),
        (3.2, "arithmetic", False),  # one state, at step 20
        (3.3, "arithmetic", True),
        (6.4, "arithmetic --trainer.checkpoint-interval 2", False),  # two are kept while a third is written
        (6.5, "arithmetic --trainer.checkpoint-interval 2", True),
        (4.2, "arithmetic --trainer.keep-best 2", False),  # two, and the two of the last checkpoint
        (4.4, "arithmetic --trainer.keep-best 2", True),
        (0.1, "gsm8k_lora", True),
        (2.6, "arithmetic --bridge reload --trainer.checkpoint-interval 0", False),  # two versions for vLLM besides
        (2.8, "arithmetic --bridge reload --trainer.checkpoint-interval 0", True),
        (2.6, "arithmetic --bridge restart --trainer.checkpoint-interval 0", False),
        (2.8, "arithmetic --bridge restart --trainer.checkpoint-interval 0", True),
    ):
        has_disk(monkeypatch, free)
        if fits:
            assert train.main([*words.split(), "--dry-run"]) == 0
        else:
            with pytest.raises(ConfigError, match=r"checkpoints take up to .*: free some, or write less \(--trainer"):
                train.main([*words.split(), "--dry-run"])


def test_the_plan_tells_the_disk_of_another_machine_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8.191 billion weights three states of 12 bytes, and the last model, the best and its successor of 4 each."""
    assert train.main(["gsm8k", "Qwen/Qwen3-8B", "--gpus", "8x80", "--dry-run"]) == 0
    assert "# Checkpoints take up to 393.2 GB of disk\n" in capsys.readouterr().out
    assert train.main(["gsm8k_lora", "--gpus", "8x80", "--dry-run"]) == 0
    assert "of disk" not in capsys.readouterr().out


def test_nothing_is_offered_that_the_disk_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 64)
    assert train.is_accepted(LARGER[0])
    has_disk(monkeypatch, 5)
    assert not train.is_accepted(LARGER[0])
    assert not train.is_accepted("train arithmetic --env.max_new_tokens 300")  # nor what leaves no room for a prompt


@pytest.mark.parametrize(
    ("model", "context"),
    [
        ("Qwen3-8B", 40_960),
        ("Qwen3-4B-Base", 32_768),
        ("Qwen3-4B-Instruct-2507", 262_144),
        ("Qwen2.5-7B-Instruct", 32_768),
    ],
)
def test_the_context_of_a_published_model_bounds_its_server_without_a_hub(model: str, context: int) -> None:
    words = ["gsm8k", f"Qwen/{model}", "--gpus", "8x80", "--dry-run", "--vllm.max_model_len"]
    assert train.main([*words, f"{context}"]) == 0
    with pytest.raises(ConfigError, match=rf"max_model_len {context + 1} is above the {context} tokens of context"):
        train.main([*words, f"{context + 1}"])


def test_what_a_run_has_written_counts_when_it_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the 3.2 GB that `arithmetic` takes at the most."""
    step = tmp_path / "mine/checkpoints/step_20"
    step.mkdir(parents=True)
    (tmp_path / "mine/run.yaml").write_text("base: arithmetic.yaml\n")
    words = ["--resume", "mine", "--runs", str(tmp_path), "--dry-run"]
    has_disk(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"take up to 3\.2\d* GB, and 2\.0\d* GB are free"):
        train.main(words)
    for name in ("a.pt", "b.pt"):
        with (step / name).open("wb") as file:
            file.truncate(GB)
    assert train.main(words) == 0
    has_disk(monkeypatch, 0.5)
    with pytest.raises(ConfigError, match=r"take up to 3\.2\d* GB, 2\.0\d* GB of it already, and 500 MB are free"):
        train.main(words)
