"""No page names a model that the doctor's memory arithmetic refuses on 80 GB GPUs, and the table of
docs/gpus.md is that arithmetic.

`SHAPES` holds what each model's config.json says; a page that names another model must add it here.
"""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from atroposlib.wire.bridge import DTYPE_BYTES
from example_trainer.launcher.device_checks import check_gpu_memory, check_heads
from example_trainer.launcher.machine import Gpu
from example_trainer.launcher.memory_plan import GIB
from example_trainer.launcher.model_files import Model
from example_trainer.modes import MODES

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FREE = 79 * GIB  # of an idle 80 GB GPU

SHAPES = {  # layers, width, feed-forward width, heads, key-value heads, vocabulary, tied embeddings
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-3B-Instruct": (36, 2048, 11_008, 16, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18_944, 28, 4, 152_064, False),
    "Qwen/Qwen2.5-14B-Instruct": (48, 5120, 13_824, 40, 8, 152_064, False),
}
FLAGS = {  # how a command line shows its mode
    "--single-copy": "single_copy",
    "--use-shared-memory": "broadcast",
    "lora_restart": "lora_restart",
    "lora_only": "lora",
    "--enable-lora": "lora",
    "--weight-bridge-mode none": "restart",
    "run_gsm8k_broadcast": "broadcast",
    "run_gsm8k_single_copy": "single_copy",
    "run_gsm8k_lora.sh": "lora",
    "run_gsm8k_lora_restart": "lora_restart",
    "run_gsm8k_restart": "restart",
    "--weight-bridge-mode reload": "reload",
    "run_gsm8k_reload": "reload",
}


@cache
def model(name: str) -> Model:
    layers, width, feed_forward, heads, kv_heads, vocabulary, tied = SHAPES[name]
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    return Model(name, {key: tuple(value.shape) for key, value in built.named_parameters()}, heads, kv_heads)


def commands(page: Path) -> Iterator[str]:
    """Each command of a page's blocks, and each in the text that names a model."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        yield from block.splitlines()
    yield from re.findall(r"`((?:scripts/|python )[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


NAMED = [
    pytest.param(command, id=f"{page.name}:{name}:{number}")
    for page in PAGES
    for number, command in enumerate(commands(page))
    for name in re.findall(r"Qwen/[\w.-]+", command)
]


def refusals(name: str, mode: str, tensor_parallel: int, gpus: int) -> list[str]:
    layout = [Gpu(index, "80 GB", FREE) for index in range(gpus)]
    findings = [
        check_gpu_memory(layout, MODES[mode], model(name), "bfloat16", tensor_parallel, running=False),
        check_heads(tensor_parallel, model(name)),
    ]
    return [str(finding) for finding in findings if finding.level == "fail"]


def mode_of(command: str) -> str:
    return next((mode for flag, mode in FLAGS.items() if flag in command), "broadcast")


@pytest.mark.parametrize("command", NAMED)
def test_a_documented_command_fits_80_gb_gpus(command: str) -> None:
    ranks = re.search(r"--tensor-parallel-size (\d+)", command)
    tensor_parallel = int(ranks[1]) if ranks else 1
    for name in re.findall(r"Qwen/[\w.-]+", command):
        assert refusals(name, mode_of(command), tensor_parallel, gpus=tensor_parallel + 1) == [], command


def test_the_arithmetic_refuses_14_billion_parameters_on_one_trainer_gpu() -> None:
    assert "220.1 GiB needed" in refusals("Qwen/Qwen2.5-14B-Instruct", "broadcast", 2, gpus=8)[0]


def test_the_table_of_the_page_is_the_arithmetic() -> None:
    page = (ROOT / "docs/gpus.md").read_text()
    rows = re.findall(
        r"^\| (Qwen/\S+) \| ([\d.]+) billion \| ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d.]+) GiB \|$", page, re.M
    )
    assert {name for name, *_ in rows} == set(SHAPES)
    both = DTYPE_BYTES["bfloat16"] + MODES["single_copy"].trainer_bytes(DTYPE_BYTES["bfloat16"])  # vLLM's, trainer's
    for name, billions, full, lora, single_copy in rows:
        parameters = model(name).parameters
        assert float(billions) == pytest.approx(parameters / 1e9, abs=0.005)
        for shown, nbytes in ((full, MODES["broadcast"].trainer), (lora, MODES["lora"].trainer), (single_copy, both)):
            assert float(shown) == pytest.approx(nbytes * parameters / GIB, abs=0.06), name


CODE = subprocess.run(
    ["git", "ls-files", "recipes", "scripts", "example_trainer", "environments", "atroposlib", "vllm_patching"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.split()


def named_in_code() -> list[str]:
    """Every model that a script, a default or an example in the code names."""
    texts = [(ROOT / path).read_text() for path in CODE if path.endswith((".py", ".sh", ".yaml"))]
    return sorted({name for text in texts for name in re.findall(r"Qwen/[\w.-]+\w", text)})


def test_the_recipes_defaults_are_named() -> None:
    assert "gpu: {model: Qwen/" in (ROOT / "recipes/gsm8k.yaml").read_text()
    assert named_in_code()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_no_default_or_example_of_the_code_is_refused_on_80_gb_gpus(mode: str, gpus: int) -> None:
    """On as many GPUs as the launchers take of those: two ranks of vLLM from three GPUs on."""
    for name in named_in_code():
        assert refusals(name, mode, 2 if gpus > 2 else 1, gpus) == [], name
