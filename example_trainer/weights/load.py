"""The model that a run trains, loaded: whole, with an adapter, or over memory that vLLM shares."""

import torch

from example_trainer.adapters import ADAPTER, load_adapted_model
from example_trainer.config import TrainerConfig
from example_trainer.model import load_model, load_tokenizer, meta_model
from example_trainer.weights.shared import SharedWeights, bind
from example_trainer.weights.written import WHOLE_MODEL, TrainedModel


def load_trained(
    config: TrainerConfig, source: str, device: torch.device, storage: SharedWeights | None = None
) -> TrainedModel:
    """The model of `source` (hub id or directory) in training mode; over `storage`, where one is given, whose values
    stay as they are. Raises ModelError or AdapterError.
    """
    if config.bridge.trains_adapter:
        return TrainedModel(load_adapted_model(source, config, device), load_tokenizer(source), ADAPTER)
    if storage is None:
        model = load_model(source, device, gradient_checkpointing=config.gradient_checkpointing)
    else:
        model = meta_model(source)
        bind(model, storage.tensors, gradient_checkpointing=config.gradient_checkpointing)
    return TrainedModel(model, load_tokenizer(source), WHOLE_MODEL)
