"""No page shows a command that the memory plan refuses on the GPUs that the command names, of 80 GB, and the tables of
docs/gpu.md are the plan's.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.commands.fine_tune import trainer_flags
from atropos_launcher.placement import gpus as layout
from atropos_launcher.placement.gpus import Need, Placement, ServerNeed, ServerPlace
from atropos_launcher.placement.ports import Ports
from atropos_launcher.plan.site import find_site, need_of
from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from example_trainer.memory.model_size import model_size, published
from example_trainer.memory.plan import GB, Serving, Training
from example_trainer.settings.config import TrainerConfig
from tests.unit.launcher.plans import PAGE_FILES, ask_for, no_processes, plan

__all__ = ["no_processes"]
ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPU = 80 * GB
HOST = 16 * GB  # of host memory: no command of a page needs more


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Each command of a page's blocks, and each in the text that names a model or is in a row `| 2x80 | ...`, with the
    GPUs of that row.
    """
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        yield from ((line, "") for line in block.splitlines())
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        row = re.match(r"\| (\d+x\d+) \|", line)
        for command in re.findall(r"`((?:scripts/|python |atropos )[^`]*)`", line):
            yield command, row[1] if row else ""


COMMANDS = [
    pytest.param(command, gpus, id=f"{page.name}:{number}")
    for page in PAGES
    for number, (command, gpus) in enumerate(commands(page))
    if gpus or re.search(r"Qwen/[\w.-]+", command)
]


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_memory", lambda: HOST)


def gpus_of(words: list[str]) -> int:
    """How many a command names."""
    named = [word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")]
    return len(named[0].split(",")) if named else 1


def trainer_refusal(words: list[str], argv: list[str]) -> str | None:
    config, _ = resolve_config(TrainerConfig, argv, prog="grpo", env={})
    return refusal_of(config, gpus_of(words))


def refusal_of(config: TrainerConfig, gpus: int, tensor_parallel: int = 1) -> str | None:
    size = model_size(config.model_name)
    assert size is not None, config.model_name
    same = config.bridge.same_devices
    mine = tuple(f"trainer {index}" for index in range(gpus))
    vllm = mine if same else tuple(f"vllm {index}" for index in range(tensor_parallel))
    placement = Placement((ServerPlace(vllm),), mine)
    need = Need(config, size, GPU, (ServerNeed(2048, "bfloat16"),))
    if need.verdict(placement).fits:
        return None
    return need.refusal(placement) or "the trainer does not fit"


def server_refusal(argv: list[str]) -> str | None:
    """For broadcast, the mode that takes most; for LoRA where the server has --enable-lora."""
    flags = dict(zip(argv, [*argv[1:], ""], strict=True))
    config = TrainerConfig.model_validate(
        {"model_name": flags["--model"], "bridge": {"kind": "lora" if "--enable-lora" in argv else "broadcast"}}
    )
    size = model_size(config.model_name)
    assert size is not None
    share = float(flags.get("--gpu-memory-utilization", 0.92))
    ranks = int(flags.get("--tensor-parallel-size", 1))
    on_host = flags.get("--bridge-staging") == "host"
    length = int(flags.get("--max-model-len", 2048))
    serving = Serving(config, size, "bfloat16", ranks, max_model_len=length, staging_on_host=on_host)
    return None if serving.least <= share * GPU else f"vLLM needs {serving.least}, {serving.staging} of it for staging"


@pytest.mark.rotating
@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("command", "gpus"), COMMANDS)
def test_a_documented_command_is_accepted_by_the_plan(command: str, gpus: str) -> None:
    words = shlex.split(command, comments=True)
    script = next((word for word in words if re.search(r"\.(py|sh|sbatch)$|^atropos$", word)), "")
    argv = words[words.index(script) + 1 :] if script else []
    argv += ["--gpus", gpus] if gpus else []
    if script.endswith("grpo.py"):
        assert trainer_refusal(words, argv) is None
    elif script.endswith("vllm_api_server.py"):
        assert server_refusal(argv) is None
    elif "run_gsm8k" in script or "quickstart" in script:
        expect_fit(Path(script).stem.removeprefix("run_"), *argv)
    elif script == "atropos" and argv[0] == "train":
        expect_fit(*(PAGE_FILES.get(word, word) for word in argv[1:]))
    elif script == "atropos" and argv[0] == "fine-tune":
        assert trainer_refusal(words, trainer_flags([PAGE_FILES.get(word, word) for word in argv[1:]])) is None
    elif script.endswith("train.sbatch"):
        expect_fit(*argv)
    else:
        pytest.fail(f"nothing here judges {command!r}")


def expect_fit(*argv: str) -> None:
    """Raises ConfigError if the plan refuses the run, on the GPUs that it names or else on 1, 2 and 8."""
    machines = [()] if "--gpus" in argv else [("--gpus", gpus) for gpus in ("1", "2", "8")]
    for machine in machines:
        asked = (*argv, *machine)
        train.expect_fit(plan(*asked), ask_for(*asked))


@pytest.mark.usefixtures("no_processes")
def test_the_page_shows_what_a_dry_run_prints() -> None:
    asked = ("gsm8k", "Qwen/Qwen2.5-3B-Instruct", "--gpus", "2x80", "--host-memory", "64")
    made = plan(*asked)
    need = need_of(ask_for(*asked), made.site)
    assert need is not None
    printed = "".join(f"{line}\n" for line in need.lines(made.site.placement, 0))
    page = (ROOT / "docs/gpu.md").read_text()
    shown = page.split("says, among other lines:\n\n```\n")[1].split("```")[0].splitlines()
    assert len(shown) == 5
    at = 0
    for line in shown:  # in this order
        assert (at := printed.find(f"{line}\n", at) + 1) > 0, f"{line!r} is not in {printed}"


def test_the_plan_refuses_a_command_that_does_not_fit() -> None:
    words = "grpo.py --model-name Qwen/Qwen2.5-14B-Instruct --weight-bridge-mode shared_vllm --use-shared-memory"
    why = trainer_refusal([f"CUDA_VISIBLE_DEVICES=2 {words}"], words.split()[1:])
    assert why is not None
    assert "weights, gradients and moments in all are 236.3 GB" in why
    assert server_refusal(["--model", "Qwen/Qwen2.5-72B-Instruct", "--tensor-parallel-size", "4"]) is not None


GUIDE = "--weight-bridge-mode shared_vllm --use-shared-memory --training-steps 100"


def test_the_guides_commands_are_accepted_where_host_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """14B with its trainer on GPU 2, 72B with its trainer on GPUs 4 and 5; vLLM on two and four others."""
    for model, gpus, host, more in (("14B", 1, 240, ""), ("72B", 2, 1170, " --gradient-checkpointing")):
        argv = f"--model-name Qwen/Qwen2.5-{model}-Instruct {GUIDE}{more}".split()
        config, _ = resolve_config(TrainerConfig, argv, prog="grpo", env={})
        assert refusal_of(config, gpus) is not None
        monkeypatch.setattr(layout, "available_memory", lambda host=host: host * GB)
        assert refusal_of(config, gpus) is None
        monkeypatch.setattr(layout, "available_memory", lambda: HOST)


def test_vllm_of_72_billion_on_four_gpus_must_leave_room_for_staging() -> None:
    argv = ["--model", "Qwen/Qwen2.5-72B-Instruct", "--tensor-parallel-size", "4"]
    assert server_refusal(argv) is not None  # as the guide has it
    assert server_refusal([*argv, "--gpu-memory-utilization", "0.95"]) is None
    assert server_refusal([*argv, "--bridge-staging", "host"]) is None


LARGE = ("gsm8k", "Qwen/Qwen2.5-72B-Instruct", "--vllm.tensor-parallel-size", "4", "--gpus", "6x80")
SAVING = ("--trainer.gradient-checkpointing", "--vllm.gpu-memory-utilization", "0.92")


@pytest.mark.usefixtures("no_processes")
def test_the_guides_layout_of_72_billion_takes_host_memory_for_states_and_staging() -> None:
    with pytest.raises(ConfigError, match=r"stage in host memory \(--vllm.bridge-staging host, 145\.4 GB\)"):
        expect_fit(*LARGE, *SAVING, "--host-memory", "1320")
    on_host = (*LARGE, *SAVING, "--vllm.bridge-staging", "host")
    expect_fit(*on_host, "--host-memory", "1320")
    with pytest.raises(ConfigError, match=r"needs .* for each of 2 trainer ranks, and 80\.0 GB are free"):
        expect_fit(*on_host, "--host-memory", "1300")  # enough for the states alone
    with pytest.raises(
        ConfigError, match=r"145\.4 GB of host memory for --vllm.bridge-staging host, and 140\.0 GB are free"
    ):
        expect_fit(*on_host, "--host-memory", "140")


@pytest.mark.usefixtures("no_processes")
def test_staging_in_host_memory_is_counted_on_a_machine_that_only_serves() -> None:
    nodes = ("--ray", "auto", "--ray-nodes", "4+2")
    apart = (*LARGE[:2], "--trainer.gradient-checkpointing", "--gpus", "8x80", *nodes)
    on_host = (*apart, "--vllm.bridge-staging", "host")
    with pytest.raises(
        ConfigError, match=r"145\.4 GB of host memory for --vllm.bridge-staging host, and 100\.0 GB are free"
    ):
        expect_fit(*on_host, "--host-memory", "100")
    expect_fit(*on_host, "--host-memory", "150")  # of each machine, and not of all servers
    expect_fit(*apart, "--host-memory", "100")
    site = plan(*on_host, "--host-memory", "150").site
    need = need_of(ask_for(*on_host, "--host-memory", "150"), site)
    assert need is not None
    room = need.verdict(site.placement).room
    assert room.host == 150 * GB // 8  # nothing is staged where the trainer is


@pytest.mark.usefixtures("no_processes")
def test_what_a_trainer_keeps_of_what_it_sent_is_in_the_plan() -> None:
    asked = ("gsm8k", "Qwen/Qwen2.5-3B-Instruct", "--gpus", "2x80", "--bridge.delta")
    need = need_of(ask_for(*asked), plan(*asked, "--host-memory", "64").site)
    assert need is not None
    training = need.verdict(plan(*asked, "--host-memory", "64").site.placement).training
    (sent,) = training.host_items
    assert sent.nbytes == 2 * training.size.count
    with pytest.raises(ConfigError, match="host memory"):
        expect_fit(*asked, "--host-memory", "6")


# --- the tables of docs/gpu.md ---------------------------------------------------------------------------------------


def activations_of(model: str, *, checkpointing: bool) -> float:
    """GB of a micro-batch of 2,560 tokens, on one of eight ranks."""
    config = TrainerConfig.model_validate({"model_name": model, "gradient_checkpointing": checkpointing})
    return Training(config, published(model), 8).activations / GB


def test_what_the_page_says_of_activations_is_the_plan() -> None:
    shown = [
        f"{activations_of(name, checkpointing=False):.0f} GB instead of"
        f" {activations_of(name, checkpointing=True):.1f} GB for {name.removeprefix('Qwen2.5-')}"
        for name in ("Qwen2.5-14B", "Qwen2.5-72B")
    ]
    assert f"take much more: {shown[0]}, and {shown[1]}." in (ROOT / "docs/gpu.md").read_text(), shown


LEAST = [  # what the page says of trainer GPUs: model, trainer GPUs, all GPUs, GB of host memory, flags
    ("14B", 4, 5, 64, ("--trainer.gradient-checkpointing",)),
    ("14B", 6, 7, 64, ()),
    ("14B", 1, 2, 240, ()),
    ("72B", 1, 5, 1170, ("--trainer.gradient-checkpointing",)),
]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("size", "mine", "gpus", "host", "flags"), LEAST)
def test_no_fewer_gpus_than_those_of_the_page_are_enough(
    size: str, mine: int, gpus: int, host: int, flags: tuple[str, ...]
) -> None:
    model = f"Qwen/Qwen2.5-{size}-Instruct"
    made = plan("gsm8k", model, "--gpus", f"{gpus}x80", "--host-memory", f"{host}", *flags)
    assert len(made.site.placement.trainer) == mine
    assert fits(size, f"{gpus}x80", "broadcast", host, *flags)
    assert not fits(size, f"{gpus - 1}x80", "broadcast", host, *flags)


SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
COLUMNS = (("broadcast", 64), ("broadcast", 256), ("broadcast", 1200), ("lora", 64), ("single_copy", 64))
CELLS = [
    pytest.param(gpus, bridge, host, cell, id=f"{gpus} {bridge} {host}")
    for gpus, *cells in re.findall(
        r"^\| (\d+x\d+) \|" + r" (\S+) \|" * len(COLUMNS), (ROOT / "docs/gpu.md").read_text(), re.MULTILINE
    )
    for (bridge, host), cell in zip(COLUMNS, cells, strict=True)
]


def fits(size: str, gpus: str, bridge: str, host: int, *flags: str) -> bool:
    asked = (f"gsm8k_{bridge}", f"Qwen/Qwen2.5-{size}-Instruct", "--gpus", gpus, "--host-memory", f"{host}", *flags)
    command = ask_for(*asked)
    site = find_site(command, Path("/run"), Ports())
    need = need_of(command, site)
    assert need is not None
    return need.refusal(site.placement) is None


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("gpus", "bridge", "host", "cell"), CELLS)
def test_the_largest_model_of_the_page_is_the_largest_that_fits(gpus: str, bridge: str, host: int, cell: str) -> None:
    size, saving = cell.rstrip("*"), "--trainer.gradient-checkpointing"
    assert fits(size, gpus, bridge, host, *([saving] if cell.endswith("*") else []))
    assert not cell.endswith("*") or not fits(size, gpus, bridge, host)
    larger = SIZES[SIZES.index(size) + 1 :][:1]
    assert not any(fits(next_size, gpus, bridge, host, saving) for next_size in larger)


def test_the_page_has_the_usual_machines() -> None:
    machines = [f"{count}x{size}" for size in (24, 80) for count in (1, 2, 4, 8)]
    assert len(CELLS) == len(machines) * len(COLUMNS)
    assert [gpus for command in COMMANDS if (gpus := str(command.values[1]))] == machines


# --- the code -------------------------------------------------------------------------------------------------------


CODE = subprocess.run(
    [
        "git",
        "ls-files",
        "recipes",
        "scripts",
        "atropos_launcher",
        "example_trainer",
        "environments",
        "atroposlib",
        "vllm_patching",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.split()


def named_in_code() -> list[str]:
    """Every model that a script, a default or an example in the code names."""
    texts = [(ROOT / path).read_text() for path in CODE if path.endswith((".py", ".sh", ".yaml"))]
    return sorted({name for text in texts for name in re.findall(r"Qwen/[\w.-]+\w", text)})


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("gpus", ["1x80", "2x80", "3x80", "8x80", "8x141"])
@pytest.mark.parametrize("recipe", ["gsm8k", "gsm8k_lora"])
def test_the_default_model_is_the_largest_that_fits(recipe: str, gpus: str) -> None:
    asked = (recipe, "--gpus", gpus)
    made = plan(*asked)
    train.expect_fit(made, ask_for(*asked))
    chosen = {
        "gsm8k 1x80": "1.5B",
        "gsm8k 2x80": "3B",
        "gsm8k 3x80": "3B",
        "gsm8k 8x80": "14B",
        "gsm8k 8x141": "14B",
        "gsm8k_lora 1x80": "7B",
        "gsm8k_lora 2x80": "14B",
        "gsm8k_lora 3x80": "14B",
        "gsm8k_lora 8x80": "14B",
        "gsm8k_lora 8x141": "14B",
    }[f"{recipe} {gpus}"]
    assert made.site.model == f"Qwen/Qwen2.5-{chosen}-Instruct"


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], r"training Qwen/Qwen2\.5-1\.5B-Instruct needs 34\.6 GB .* --bridge lora --trainer\.gradient-checkpoint"),
        # it was told to take 104 %: 0.4 of the GPU, and a staging buffer of 15.2 GB
        (["Qwen/Qwen2.5-7B-Instruct"], r"vLLM needs 32\.5 GB .* has 24\.0 GB of which it may take 92%"),
        (
            ["Qwen/Qwen3-8B", "--bridge", "lora", "--vllm.gpu-memory-utilization", "0.4"],
            r"vLLM needs 18\.5 GB on each of 1 GPU\(s\) but .* more of its GPU \(--vllm\.gpu-memory-utilization 0\.78\)"
            r", or use a smaller model$",
        ),
    ],
)
def test_a_gpu_that_is_too_small_is_refused_with_the_flags_that_help(words: list[str], says: str) -> None:
    asked = ("gsm8k", *words, "--gpus", "1x24", "--host-memory", "16")
    with pytest.raises(ConfigError, match=says):
        train.expect_fit(plan(*asked), ask_for(*asked))


def test_code_names_models_that_the_plan_knows() -> None:
    assert [name for name in named_in_code() if model_size(name) is None] == []
