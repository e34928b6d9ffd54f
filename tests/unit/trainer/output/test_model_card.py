"""The page of a trained model."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from example_trainer.output.model_card import Measured, model_card, write_model_card
from example_trainer.settings.config import TrainerConfig

BROADCAST = {"kind": "broadcast"}
ROWS = [Measured(1, 0.125, None), Measured(2, 0.5, 0.25), Measured(3, 0.75, 0.875)]


def config(**changed: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model_name": "org/small-model", "bridge": BROADCAST, **changed})


def test_a_hub_reads_its_metadata() -> None:
    card = ModelCard(model_card(config(), ROWS))
    assert card.data.to_dict()["base_model"] == "org/small-model"
    assert card.data.to_dict()["library_name"] == "transformers"
    assert card.data.to_dict()["pipeline_tag"] == "text-generation"
    assert "grpo" in card.data.to_dict()["tags"]


def test_an_adapter_is_said_to_be_one() -> None:
    card = ModelCard(model_card(config(bridge={"kind": "lora"}), ROWS))
    assert card.data.to_dict()["library_name"] == "peft"
    assert "# A LoRA adapter for org/small-model" in card.text


def test_a_directory_is_no_model_id(tmp_path: Path) -> None:
    card = ModelCard(model_card(config(model_name=str(tmp_path)), ROWS))
    assert "base_model" not in card.data.to_dict()
    assert str(tmp_path.parent) not in card.content


def test_results_are_the_first_and_the_last_that_were_measured() -> None:
    text = model_card(config(), ROWS)
    assert "| mean sampled reward | 0.125 (step 1) | 0.750 (step 3) |" in text
    assert "| held-out accuracy | 0.250 (step 2) | 0.875 (step 3) |" in text


def test_settings_are_those_of_the_run() -> None:
    text = model_card(config(lr=3e-6, training_steps=7, seed=11), ROWS)
    for line in ("| lr | 3e-06 |", "| training_steps | 7 |", "| seed | 11 |", "- torch "):
        assert line in text


@pytest.mark.parametrize("there", [True, False])
def test_a_model_is_written_with_and_without_the_run_s_metrics(tmp_path: Path, there: bool) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if there:
        metrics.write_text('{"step": 1, "reward_mean": 0.5, "accuracy": null, "loss": 0.1}\n')
    write_model_card(tmp_path, config(metrics_path=str(metrics)))
    assert ("0.500 (step 1)" in (tmp_path / "README.md").read_text()) is there
