"""Loading a causal language model for training: float32, packed attention, and a check that the packed path computes
the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from atroposlib.errors import reading, reason
from atroposlib.wire.published import FAMILIES, Shape
from example_trainer.data.packing import MicroBatch
from example_trainer.errors import ModelError as ModelError
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy
from example_trainer.model.rotary import expect_length, original_length

# of two ways to compute the same logits, relative to the largest
PACKED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
FAR_TOKENS = 4  # of the check's sequence behind a model's original length


def load_model(
    name: str, device: torch.device, *, gradient_checkpointing: bool = False, longest: int | None = None
) -> PreTrainedModel:
    """The model `name` (hub id or local directory) in float32 on `device`, in training mode without dropout, for
    sequences of up to `longest` tokens (None: as many as it takes).
    """
    with reading_model(name), _choosing_attention(name):
        expect_length(AutoConfig.from_pretrained(name), longest)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32,
            attn_implementation=PACKED_SDPA,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which are refused below, by name
        )
    model: PreTrainedModel = loaded[0]
    _expect_whole(name, **loaded[1])
    nn.Module.to(model, device)
    prepare_for_training(model, gradient_checkpointing=gradient_checkpointing, longest=longest)
    check_packed_forward(Policy(model), device, longest=longest)
    return model


def _expect_whole(
    name: str, missing_keys: Iterable[str], mismatched_keys: Iterable[tuple[str, Shape, Shape]], **other: object
) -> None:
    """Raise ModelError where transformers made up a tensor that the files lack, or have in another shape. Tied weights
    and buffers that code computes are not among these.
    """
    wrong = [f"{tensor} is missing" for tensor in sorted(missing_keys)]
    wrong += [f"{tensor} is {[*found]} there, not {[*own]}" for tensor, found, own in sorted(mismatched_keys)]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ModelError(
            f"the weight files of {name!r} do not hold the model that its config.json describes: {'; '.join(wrong[:3])}"
            f"{more}; download or save the model again"
        )


def meta_model(name: str) -> PreTrainedModel:
    """The architecture of `name` (hub id or local directory) without any weights: it reads config.json alone."""
    with reading_model(name), _choosing_attention(name), torch.device("meta"):
        return cast(
            PreTrainedModel,
            AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(name), attn_implementation=PACKED_SDPA, dtype=torch.float32
            ),
        )


def reading_model(name: str) -> AbstractContextManager[None]:
    """Turns what transformers raises for a model that is not there into one line."""
    kind = "directory" if Path(name).is_dir() else "model id (there is no directory of that name here)"
    return reading(
        f"cannot load --model-name {name!r}, a {kind}",
        ModelError,
        remedy=(
            "give a Hugging Face model id that this machine has cached or can download, or a directory with "
            "config.json "
            "and safetensors weights"
        ),
        also=(SafetensorError,),
    )


@contextmanager
def _choosing_attention(name: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        if error.args != (PACKED_SDPA,):
            raise
        raise ModelError(
            f"{name} cannot be trained with packed sequences: its architecture has attention functions of its own, such"
            " as Falcon's; docs/what_works.md lists the families that can"
        ) from None


def expect_even_layers(model: PreTrainedModel) -> None:
    """Raise ModelError for what cannot be spread over ranks layer by layer: experts of families whose files are not
    known (atroposlib/wire/published.py), or parts that read images.
    """
    known = model.config.model_type in FAMILIES
    for name, module in model.named_modules():
        kind = type(module).__name__
        experts = not known and ("Experts" in kind or "SparseMoe" in kind)
        if parts := "experts" if experts else "images" if "Vision" in kind else None:
            raise ModelError(
                f"{type(model).__name__} is a model with {parts} ({name} is a {kind}): use a text model, such as Llama,"
                " Mistral, Qwen2, Qwen3, Qwen3-MoE or Mixtral, or --trainer-ranks 1 --compute-dtype float32 --offload"
                " none"
            )


def prepare_for_training(model: PreTrainedModel, *, gradient_checkpointing: bool, longest: int | None = None) -> None:
    """Training mode, without dropout and cache, with a gradient for every embedding, for sequences of up to `longest`
    tokens (None: as many as the model takes); of a mixture of experts without the loss that balances its router, which
    the objectives do not have. Raises ModelError.
    """
    expect_length(model.config, longest)
    for module in model.modules():
        _without_dropout(module)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # nothing is padded here, and prompts may hold that token
    model.train()
    model.config.use_cache = False
    if model.config.model_type in FAMILIES:
        model.config.output_router_logits = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _without_dropout(module: nn.Module) -> None:
    """The sampler has none: dropout would turn the probability ratio into noise. Some families keep the rate in a
    number of their own and call the function.
    """
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    for name, value in vars(module).items():
        if isinstance(value, float) and "drop" in name:
            setattr(module, name, 0.0)


def rebuild_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what a meta model could not and no weight file holds: the rotary embeddings' tables, and what the model's
    own `_init_weights` computes, such as Gemma's scale of embeddings. Raises ModelError for any other buffer.
    """
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    for name, module in list(model.named_modules()):
        own = {f"{name}.{leaf}" for leaf, _ in module.named_buffers(recurse=False)}
        if not own:
            continue
        if "RotaryEmbedding" in type(module).__name__:
            with torch.device(device):
                model.set_submodule(name, type(module)(module.config))
        elif not own <= computed or not _rebuilt(model, module, device):
            raise ModelError(
                f"{name} is a {type(module).__name__} with a buffer that config.json does not give: use --trainer-ranks"
                " 1 --compute-dtype float32 --offload none without --single-copy, and --checkpoint-format hf"
            )


def expect_rebuildable(model: PreTrainedModel) -> None:
    """Raise ModelError, as `rebuild_buffers` does, for a model that cannot be loaded over a meta model."""
    with torch.device("meta"):
        twin = type(model)(model.config)
    rebuild_buffers(twin, torch.device("cpu"))


def is_rebuildable(model: PreTrainedModel) -> bool:
    """Return whether `expect_rebuildable` raises nothing."""
    try:
        expect_rebuildable(model)
    except ModelError:
        return False
    return True


@torch.no_grad()
def _rebuilt(model: PreTrainedModel, module: nn.Module, device: torch.device) -> bool:
    """Have the model's code compute the buffers of one of its modules, and return whether it has computed each.
    Parameters stay as they are.
    """
    for parameter in module.parameters(recurse=False):
        cast(Any, parameter)._is_hf_initialized = True  # transformers' own mark of what it must not touch
    computed = []
    for before in (0, 1):  # what stays is not computed
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, leaf, torch.full_like(buffer, before, device=device))
        model._init_weights(module)
        computed.append(dict(module.named_buffers(recurse=False)))
    return all(torch.equal(value, computed[1][leaf]) for leaf, value in computed[0].items())


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model, to be kept in checkpoints; None where there is none. Training itself never uses
    text.
    """
    with suppress(OSError, ValueError):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(name))
    return None


@torch.no_grad()
def check_packed_forward(
    policy: Policy, device: torch.device, dtype: torch.dtype | None = None, *, longest: int | None = None
) -> None:
    """Raise ModelError unless logits of packed sequences, two of which share their beginning, equal those of the
    model's own forward on each alone, up to the rounding of `dtype` and of the parameters' own. The last one
    stands at positions behind the model's original length, if sequences of `longest` tokens reach them. None is as long
    as a sliding window: of that it is asked whether it reaches the attention, if such sequences exceed it.
    """
    model = policy.model
    lengths, parents = (4, 1, 3, 4, FAR_TOKENS), (-1, 0, 0, -1, -1)
    begins = (0, 4, 4, 0, _far_position(model, longest))
    tokens = torch.arange(1, 1 + sum(lengths), device=device) % model.config.get_text_config().vocab_size
    none = torch.empty(0, device=device)
    packed = MicroBatch(
        input_ids=tokens[None],
        position_ids=torch.cat(
            [torch.arange(begin, begin + length, device=device) for begin, length in zip(begins, lengths, strict=True)]
        )[None],
        lengths=lengths,
        parents=parents,
        rows=torch.arange(len(tokens), device=device),
        targets=tokens,
        sampler_logprobs=none,
        old_logprobs=none,
        advantages=none,
        weights=none,
        temperatures=none,
        reference_logprobs=none,
    )
    windows: set[int | None] = set()
    try:
        packed_logits, expected = policy.logits_both_ways(packed, windows)
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # of a family's own code
        raise ModelError(f"{type(model).__name__} cannot be trained with packed sequences: {reason(error)}") from error
    difference = (packed_logits - expected).abs().max().item()
    limit = max(PACKED_TOLERANCE[each] for each in (dtype or model.dtype, model.dtype)) * max(
        1.0, expected.abs().max().item()
    )
    if not difference <= limit:
        raise ModelError(
            f"{type(model).__name__} cannot be trained with packed sequences: its logits differ by {difference:.3g}"
            f" (limit {limit:.3g}) from its own forward pass; only architectures with the attention and the plain head"
            " of Llama and Qwen are supported"
        )
    window = _window(model, longest)
    if windows and window is not None and window not in windows:
        raise ModelError(
            f"{type(model).__name__} cannot be trained with packed sequences of more than {window} tokens: that is"
            " sliding_window in its config.json, which its code applies by a mask alone, and packed sequences have"
            f" none; give --seq-len {window}, or less"
        )


def _far_position(model: PreTrainedModel, longest: int | None) -> int:
    """The first position behind the model's original length, if sequences of `longest` tokens (None: as many as it
    takes) reach it; else 0. No sequence has to be so long: positions are given.
    """
    config = model.config.get_text_config()
    original = original_length(config)
    reached = getattr(config, "max_position_embeddings", 0) if longest is None else longest
    return original if original is not None and original + FAR_TOKENS <= reached else 0


def _window(model: PreTrainedModel, longest: int | None) -> int | None:
    """The model's sliding window, if sequences of `longest` tokens (None: as many as it takes) exceed it."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    # some config.json have a window that the architecture does not know
    if "sliding_window" not in type(config).__dataclass_fields__ or "sliding_attention" not in (
        layer_types or ["sliding_attention"]
    ):
        return None
    reached = getattr(config, "max_position_embeddings", 0) if longest is None else longest
    return config.sliding_window if config.sliding_window and config.sliding_window < reached else None
