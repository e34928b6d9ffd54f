"""LoRA adapters: adds one to a model for training, and reads and writes it as a PEFT directory, which vLLM loads.

    Linear W  ──▶  W (frozen) + lora_alpha / lora_r * B A      A, B trained; B = 0 at first: the model starts unchanged

LoRA is Hu et al. 2021, arXiv 2106.09685. The model remains a plain transformers model (no PeftModel around it), so
packed attention and the chunked head still work. A directory is `adapter_config.json` and `adapter_model.safetensors`,
as PEFT and vLLM read them; it is written whole or not at all.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atroposlib.errors import reading
from example_trainer.errors import TrainerError
from example_trainer.model.loading import load_model, meta_model, prepare_for_training
from example_trainer.settings.bridges import Adapter
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import Form

NAME = "default"  # PEFT's name of the one adapter in the model; not part of what is saved
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class AdapterError(TrainerError):
    """An adapter that does not fit the model, or cannot be read."""


class SavedAdapter(msgspec.Struct):
    """Holds what is read from adapter_config.json."""

    base_model_name_or_path: str
    r: int
    lora_alpha: int
    target_modules: list[str]


def load_adapted_model(source: str, config: TrainerConfig, device: torch.device) -> PreTrainedModel:
    """`--model-name` frozen, with a trainable adapter: the one in `source`, or a fresh one if `source` is the
    model itself. Raises ModelError, or AdapterError, which names the layers that --lora-target-modules can name.
    """
    resumed = _resumed(source, config)
    model = load_model(
        config.model_name, device, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len
    )
    _inject(model, config)
    if resumed:
        load_weights(model, resumed)
    return model


def meta_adapted_model(
    source: str, config: TrainerConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return what `load_adapted_model` gives, without storage and with the frozen weights in `dtype`; and the
    adapter's values by parameter name. They are the same on every rank, and with one rank, given the same seed.
    """
    resumed = _resumed(source, config)
    model = meta_model(config.model_name)
    prepare_for_training(model, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len)
    nn.Module.to(model, dtype)
    linears = {module: module.weight for module in _linears(model).values()}
    for module, weight in linears.items():  # a CPU tensor of one number: PEFT makes the adapter where the weight is
        module.weight = nn.Parameter(torch.zeros(()).expand(weight.shape), requires_grad=False)
    _inject(model, config)
    for module, weight in linears.items():
        module.weight = weight.requires_grad_(False)
    if resumed:
        load_weights(model, resumed)
    values = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    nn.Module.to(model, "meta")
    return model, values


def _resumed(source: str, config: TrainerConfig) -> Path | None:
    if source == config.model_name:
        return None
    _check_settings(Path(source), config)
    return Path(source)


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    head = model.get_output_embeddings()  # may be tied to the embeddings
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def _inject(model: PreTrainedModel, config: TrainerConfig) -> None:
    mode = config.mode(Adapter)
    present = list(dict.fromkeys(name.rpartition(".")[2] for name in _linears(model)))
    if unknown := [name for name in mode.target_modules if name not in present]:
        raise AdapterError(
            f"--lora-target-modules: {config.model_name} has no linear layer named {', '.join(unknown)}; it has"
            f" {', '.join(present)}"
        )
    inject_adapter_in_model(
        LoraConfig(
            r=mode.r,
            lora_alpha=mode.alpha,
            lora_dropout=mode.dropout,
            target_modules=list(mode.target_modules),
            task_type="CAUSAL_LM",
            base_model_name_or_path=config.model_name,
        ),
        model,
        NAME,
    )


def saved_name(name: str) -> str:
    """The name under which PEFT saves a parameter of the adapter."""
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"


def name_in_files(name: str) -> str:
    """The name that a frozen parameter has in the files of its model, which know no adapter."""
    return name.replace(".base_layer.", ".")


def adapter_tensors(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trained parameters by the names PEFT saves them under."""
    return {saved_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def write_adapter(folder: Path, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors`, by the names PEFT saves them under, as the adapter of `model`."""
    model.peft_config[NAME].save_pretrained(folder)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


def _write_adapter(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    write_adapter(folder, model, adapter_tensors(model))


ADAPTER = Form(
    "adapter_step_",
    "final_adapter",
    "best_adapter",
    _write_adapter,
    lambda model: sum(tensor.nbytes for tensor in adapter_tensors(model).values()),
)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the tensors of an adapter directory into the model's adapter. Raises AdapterError if they do not fit."""
    saved = read_adapter(folder, model)
    for name, parameter in adapter_tensors(model).items():
        parameter.copy_(saved[name])


def read_adapter(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of an adapter directory by the names PEFT saves them under. Raises AdapterError if they do not
    fit the model's adapter.
    """
    with reading(
        f"{folder / WEIGHTS} cannot be read",
        AdapterError,
        remedy="give another directory to --resume",
        also=(SafetensorError,),
    ):
        saved = load_file(folder / WEIGHTS)
    own = adapter_tensors(model)
    wrong = own.keys() ^ saved.keys()
    wrong |= {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape}
    if wrong:
        raise AdapterError(
            f"{folder} contains an adapter of another model: {len(wrong)} of its tensors do not fit, e.g. {min(wrong)}"
        )
    return saved


def _check_settings(folder: Path, config: TrainerConfig) -> None:
    mode = config.mode(Adapter)
    if not (folder / CONFIG).is_file():
        raise AdapterError(
            f"{folder} contains no adapter ({CONFIG}), but --weight-bridge-mode {mode.typed} trains one: "
            "resume from an adapter_step_N directory, or start afresh"
        )
    with reading(f"{folder / CONFIG} cannot be read", AdapterError, remedy="give another directory to --resume"):
        saved = msgspec.json.decode((folder / CONFIG).read_bytes(), type=SavedAdapter)
    for flag, then, given in [  # not the dropout, which may change
        ("--model-name", saved.base_model_name_or_path, config.model_name),
        ("--lora-r", saved.r, mode.r),
        ("--lora-alpha", saved.lora_alpha, mode.alpha),
        ("--lora-target-modules", ",".join(sorted(saved.target_modules)), ",".join(sorted(mode.target_modules))),
    ]:
        if then != given:
            raise AdapterError(
                f"{folder} was trained with {flag} {then}, this run has {given}: give the same, or start afresh"
            )
