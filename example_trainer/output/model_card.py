"""The README.md of a trained model: what it was trained from, how, and with which results. Hubs show it as its page."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from huggingface_hub import ModelCardData

from atroposlib.extras import installed_version
from atroposlib.flags import package_version
from example_trainer.settings.config import TrainerConfig

PACKAGES = ("torch", "transformers", "vllm")
SETTINGS = (
    "training_steps",
    "batch_size",
    "gradient_accumulation_steps",
    "seq_len",
    "lr",
    "warmup_steps",
    "lr_decay_steps",
    "lr_by_signal",
    "ema_decay",
    "optimizer",
    "weight_decay",
    "max_grad_norm",
    "algorithm",
    "objective",
    "clip_eps",
    "kl_coef",
    "distill_coef",
    "distill",
    "reward_coef",
    "offline_share",
    "seed",
)


SHOWN = (
    ("mean sampled reward", "reward_mean"),
    ("held-out accuracy", "accuracy"),
    ("loss of demonstrations", "sft_loss"),
    ("loss of preference pairs", "dpo_loss"),
)


class Measured(msgspec.Struct):
    """Holds what is read from a row of metrics.jsonl; null where it was not measured."""

    step: int
    reward_mean: float | None = None
    accuracy: float | None = None
    sft_loss: float | None = None
    dpo_loss: float | None = None


def write_model_card(folder: Path, config: TrainerConfig) -> None:
    """Write README.md into `folder`, from the configuration and the rows of the run's metrics.jsonl.

    Without that file the card has no results: a trained model is not lost for want of a page about it.
    """
    lines = config.metrics_file.read_bytes().splitlines() if config.metrics_file.is_file() else []
    rows = [msgspec.json.decode(line, type=Measured) for line in lines]
    (folder / "README.md").write_text(model_card(config, rows), encoding="utf-8")


def model_card(config: TrainerConfig, rows: Sequence[Measured]) -> str:
    """Metadata as YAML, then a page in Markdown."""
    # A directory is nobody's model id: a hub would refuse the card.
    is_hub_id = not Path(config.model_name).exists()
    library = "peft" if config.bridge.trains_adapter else "transformers"
    data = ModelCardData(
        base_model=config.model_name if is_hub_id else None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["fine-tuning", "atropos"] if config.offline_alone else ["reinforcement-learning", "grpo", "atropos"],
    )
    what = "A LoRA adapter for" if config.bridge.trains_adapter else "Trained from"
    name = config.model_name if is_hub_id else Path(config.model_name).name
    settings = config.model_dump(mode="json", include=set(SETTINGS))
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {what} {name} by {'fine-tuning' if config.offline_alone else 'reinforcement learning'}",
        "",
        f"Offline data with Atropos {package_version()}."
        if config.offline_alone
        else f"GRPO with Atropos {package_version()}, weights handed to vLLM by `{config.bridge.shown()}`.",
        "",
        *_results(rows),
        "## Settings",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {setting} | {settings[setting]} |" for setting in SETTINGS),
        "",
        "## Versions",
        "",
        *(f"- {package} {version}" for package in PACKAGES if (version := installed_version(package))),
        "",
    ]
    return "\n".join(lines)


def _results(rows: Sequence[Measured]) -> list[str]:
    """The first and the last value of what was measured."""
    lines = ["## Results", "", "| | first | last |", "|---|---|---|"]
    for label, key in SHOWN:
        measured = [(row.step, value) for row in rows if (value := getattr(row, key)) is not None]
        if measured:
            (first_step, first), (last_step, last) = measured[0], measured[-1]
            lines.append(f"| {label} | {first:.3f} (step {first_step}) | {last:.3f} (step {last_step}) |")
    return [*lines, ""]
