"""The four comparisons. Each makes its peer's environment, writes the work, and names the commands of its arms."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atropos_launcher.placement.ray_cluster import ON_LOOPBACK
from atroposlib.envs.data.problems import arithmetic_problems
from benchmarks.api_throughput import Settings, make_groups
from benchmarks.peers.comparison import Arm, Comparison, Goal, Work
from benchmarks.peers.environment import folder_of, layered_python
from benchmarks.peers.fake_server import fake_server
from benchmarks.trainer_step import SHARED, make_items, prepare_logprobs

ROOT = Path(__file__).resolve().parents[2]
ARMS = "benchmarks.peers.arms"
OURS = sys.executable

TRANSFER_QUEUE = (
    *("TransferQueue==0.1.11", "tensordict==0.15.3", "hydra-core==1.3.8", "omegaconf==2.3.1"),
    *("antlr4-python3-runtime==4.9.3", "pyvers==0.2.3"),
)
VERIFIERS = ("verifiers==0.4.0",)  # and all of scripts/verifiers.lock
SKYRL = (
    *("skyrl==0.3.0", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax==0.2.8", "orbax-checkpoint==0.12.8"),
    *("tensorstore==0.1.86", "ml_dtypes==0.6.0", "opt_einsum==3.4.0", "treescope==0.1.10", "etils==1.15.0"),
    *("humanize==4.17.0", "simplejson==4.3.0", "aiofiles==25.1.0", "zipp==4.1.2", "scipy==1.17.1"),
    *("cloudpathlib==0.26.0", "peft==0.18.1", "transformers==5.8.0", "tokenizers==0.22.2", "huggingface-hub==1.33.0"),
)
TRL = ("trl==1.16.0",)

GROUPS, SEQUENCES, TOKENS, BATCH = 400, 8, 512, 40
TASKS, ROLLOUTS, AT_ONCE = 20, 8, 16
STEPS = 4
GOAL = 0.95
MOST_STEPS = 60
HELD_OUT = 64


def python_of(name: str, packages: tuple[str, ...]) -> str:
    """The Python of a peer's environment."""
    return str(layered_python(folder_of(name, packages), packages))


def own_cluster() -> dict[str, str]:
    """Settings of Ray with which only the arm's processes join its cluster; by itself it writes a token to ~/.ray."""
    return {**ON_LOOPBACK, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def transfer_queue(work: Work) -> Iterator[list[Arm]]:
    """Groups put and fetched: the batching API with its journal and without, and TransferQueue."""
    theirs = python_of("transfer_queue", TRANSFER_QUEUE)
    bodies = make_groups(Settings(groups=GROUPS, sequences=SEQUENCES, tokens=TOKENS))
    (work.folder / "groups.json").write_bytes(b"[" + b",".join(bodies) + b"]")
    given = [str(work.folder), str(BATCH)]
    journal = str(work.folder / f"groups-{work.run}.db")
    yield [
        Arm("batching API, fsync", [OURS, "-m", f"{ARMS}.batching_api", *given, journal], 600),
        Arm("batching API, in memory", [OURS, "-m", f"{ARMS}.batching_api", *given], 600),
        Arm("TransferQueue", [theirs, "-m", f"{ARMS}.transfer_queue", *given], 600, own_cluster()),
    ]


@contextmanager
def verifiers(work: Work) -> Iterator[list[Arm]]:
    """Episodes of one question each over a server without a model: an environment of this project, and vf-eval."""
    subprocess.run([ROOT / "scripts/verifiers_setup.sh"], check=True, stdin=subprocess.DEVNULL)
    with fake_server("It is 7.") as url:
        folders = {name: work.folder / f"{name}-{work.run}" for name in ("ours", "theirs")}
        for folder in folders.values():
            folder.mkdir()
        played = [OURS, "-m", f"{ARMS}.episodes", str(TASKS * ROLLOUTS)]
        ours = [OURS, str(ROOT / "benchmarks/peers/arms/sums_server.py"), "process", f"--env.total_steps={TASKS}"]
        ours += [f"--env.group_size={ROLLOUTS}", f"--env.max_num_workers={AT_ONCE // ROLLOUTS}"]
        ours += [f"--env.data_path_to_save_groups={folders['ours'] / 'groups.jsonl'}", f"--openai.base_url={url}"]
        ours += ["--openai.server_type=vllm", "--openai.model_name=fake", "--env.use_wandb=false"]
        ours += [f"--env.tokenizer_name={work.model}"]
        bin_of_theirs = ROOT / ".venv-verifiers/bin"
        theirs = [str(bin_of_theirs / "vf-eval"), "sums", "--env.agent.harness.id", "null"]
        theirs += ["--env.agent.runtime.type", "subprocess", "--client.base-url", url]
        theirs += ["--client.api-key-var", "NO_KEY", "--model", "fake", "-n", str(TASKS), "-r", str(ROLLOUTS)]
        theirs += ["-c", str(AT_ONCE), "--no-push", "--no-rich", "-o", str(folders["theirs"])]
        tasksets = {
            "PYTHONPATH": str(ROOT / "environments/verifiers_tasksets"),
            "PATH": os.pathsep.join([str(bin_of_theirs), os.environ.get("PATH", os.defpath)]),  # its harness calls uv
            "UV_PYTHON": str(bin_of_theirs / "python"),
            "NO_KEY": "none",
        }
        yield [
            Arm("environment loop", [*played, str(folders["ours"]), *ours], 600),
            Arm("vf-eval", [*played, str(folders["theirs"]), *theirs], 900, tasksets),
        ]


@contextmanager
def skyrl(work: Work) -> Iterator[list[Arm]]:
    """The quickstart's first batch: a training step each, and 64 sampled answers each."""
    theirs = python_of("skyrl", SKYRL)
    work.linked_model()
    shape = next(iter(SHARED.values()))
    items = work.folder / "items.json"
    if not items.exists():
        items.write_text(json.dumps(make_items(49_152, *shape)))
        prepare_logprobs(work.folder, 2)
    groups = json.loads(items.read_text())
    trained = sum(len(tokens) for group in groups for tokens in group["tokens"])
    sampled = 24 * sum(len(group["tokens"]) for group in groups)
    step = [OURS, "-m", f"{ARMS}.steps", str(work.folder), str(STEPS)]
    ours = [OURS, "-m", "benchmarks.trainer_step", "--arm", "ours", "--kernels", "auto", "--threads", "2"]
    of_skyrl = [theirs, "-m", f"{ARMS}.skyrl"]
    variables = {"JAX_PLATFORMS": "cpu"}
    yield [
        Arm("trainer step", [*step, str(trained), *ours, "--work", str(work.folder)], 900),
        Arm("SkyRL-tx step", [*step, str(trained), *of_skyrl, "train", str(work.folder)], 900, variables),
        Arm("vLLM sampling", [*step, str(sampled), OURS, "-m", f"{ARMS}.vllm_sampling", str(work.folder)], 900),
        Arm("SkyRL-tx sampling", [*step, str(sampled), *of_skyrl, "sample", str(work.folder)], 900, variables),
    ]


def questions() -> dict[str, list[dict[str, str]]]:
    """The quickstart's questions with their results, to train on and held out."""
    problems = arithmetic_problems(HELD_OUT)
    parts = {"train": problems.train, "held_out": problems.held_out}
    return {name: [{"question": each.question, "result": each.result} for each in part] for name, part in parts.items()}


@contextmanager
def trl(work: Work) -> Iterator[list[Arm]]:
    """The quickstart's task to 95 % of 64 held-out questions, in at most 60 steps: the quickstart, and TRL's loop."""
    theirs = python_of("trl", TRL)
    work.linked_model()
    (work.folder / "problems.json").write_text(json.dumps(questions()))
    given = [str(work.folder), str(GOAL), str(work.run), str(MOST_STEPS)]
    yield [
        Arm("quickstart", [OURS, "-m", f"{ARMS}.quickstart", *given], 1800),
        Arm(
            "TRL, bfloat16, no checkpointing",
            [theirs, "-m", f"{ARMS}.trl_loop", *given, json.dumps({"gradient_checkpointing": False})],
            5400,
        ),
    ]


COMPARISONS = {  # the quickest first
    "transfer_queue": Comparison(
        TRANSFER_QUEUE, transfer_queue, (Goal("groups_per_s", "batching API, fsync", "TransferQueue", 5),)
    ),
    "verifiers": Comparison(VERIFIERS, verifiers),
    "skyrl": Comparison(
        SKYRL,
        skyrl,
        (
            Goal("tokens_per_s", "trainer step", "SkyRL-tx step", 2),
            Goal("tokens_per_s", "vLLM sampling", "SkyRL-tx sampling", 1),
        ),
    ),
    "trl": Comparison(
        TRL,
        trl,
        tuple(
            Goal(metric, "quickstart", "TRL, bfloat16, no checkpointing", 3, less=True)
            for metric in ("seconds_to_goal", "cpu_s")
        ),
    ),
}
