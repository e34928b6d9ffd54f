"""Does a run fit into memory? The one answer of the trainer, the launcher and the doctor.

    Training, Room ──fits──▶ Verdict: what was left to the plan, decided; and if it does not fit, the flags that help

The trainer asks before it loads, the launcher lays out GPUs by it, `--dry-run` and the doctor print it. This module
loads no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from example_trainer.memory.plan import OFFLOADS, BesideVllm, Training, amount, offloads, table, total
from example_trainer.settings.bridges import MODES
from example_trainer.settings.config import TrainerConfig

# a step of 1.7B on an H100: 2048 tokens 0.097, 8192 0.26, 12288 0.27 of the peak rate (docs/benchmarks/gpu.md)
GPU_TOKENS = (16384, 8192, 4096)
GPU_LOGITS_MB = 1024
GAPS = 0.1  # of a GPU, which larger passes leave to the allocator: it had 1.06 to 1.17 times what was allocated there

ADAPTER = "a LoRA adapter (--weight-bridge-mode lora_only)"

Way = tuple[str, Training]  # a change, as flags, and what is trained then


@dataclass(frozen=True)
class Room:
    """Holds what is free for the trainer: bytes of each rank's device, and of host memory for each rank. `most` is how
    many ranks there may be, None where that is not known.
    """

    device: int
    host: int
    most: int | None = None

    def lacks(self, training: Training | BesideVllm) -> int:
        """Bytes too little of the one or the other; not above 0 where it fits. Without a GPU both are one memory."""
        if not training.on_gpu:
            return training.need + training.host - self.device
        return max(training.need - self.device, training.host - self.host)


@dataclass(frozen=True)
class Verdict:
    """Tells whether `training`, of which everything is decided, fits a rank's `room`, and what to do if not."""

    training: Training
    room: Room

    @property
    def fits(self) -> bool:
        """Return whether there is room for all of it."""
        return self.room.lacks(self.training) <= 0

    @property
    def decided(self) -> dict[str, object]:
        """The settings that were left to the plan."""
        names = ("offload", "micro_batch_tokens", "logits_chunk_mb")
        return {name: getattr(self.training.config, name) for name in names}

    @property
    def table(self) -> list[str]:
        """List what each rank of the trainer takes, when its device is fullest."""
        training, room = self.training, self.room
        rank = f"each of {training.ranks} trainer ranks" if training.ranks > 1 else "the trainer"
        lines = table(f"Memory of {rank}, fullest in: {training.peak}", training.items, room.device)
        return lines + (table("  and in host memory", training.host_items, room.host) if training.host_items else [])

    def refusal(self, where: str, spelt: Callable[[str], str] = str) -> str:
        """Explain why it does not fit on `where`, with the numbers and the flags that help, as `spelt` writes them."""
        return f"{self.shortage(where)}: {spelt(self.advice)}"

    def shortage(self, where: str) -> str:
        """The numbers of what does not fit on `where`."""
        training, room = self.training, self.room
        states = [item for place in training.states.values() for item in place]
        needed = f"{amount(training.need)} on {where}"
        free = f"{amount(room.device)} are free"
        if training.on_gpu and training.host:
            needed += f" and {amount(training.host)} of host memory"
            free = f"{amount(room.device)} and {amount(room.host)} are free"
        rank = f" for each of {training.ranks} trainer ranks" if training.ranks > 1 else ""
        return (
            f"training {training.config.model_name} needs {needed}{rank}, and {free}"
            f" ({amount(room.lacks(training))} too little; weights, gradients and moments in all are"
            f" {amount(total(states) * training.shard * training.tp)})"
        )

    @property
    def advice(self) -> str:
        """The flags that help."""
        ways = self.remedies
        return (
            f"give {', or '.join(ways)}, or use a smaller model" if ways else "use a smaller model, or larger devices"
        )

    @property
    def remedies(self) -> list[str]:
        """List the changes that make it fit, as flags, each checked by this plan on devices with as much free memory:
        of each kind of change the smallest.
        """
        smallest = (next(self._fitting(ways), None) for ways in _changes(self.training, self.room.most))
        return [words for words in smallest if words is not None]

    def _fitting(self, ways: Iterable[Way]) -> Iterator[str]:
        """Yield those that make it fit, each with as few changes for the activations as it needs."""
        for words, changed in ways:
            for more, settings in less_activations(changed.config):
                if self.room.lacks(changed.having(**settings)) <= 0:
                    yield " ".join(filter(None, [words, more]))
                    break


def fits(training: Training, room: Room) -> Verdict:
    """Decide what is left to the plan, and whether it fits. --offload auto becomes the cheapest that fits, or none
    where nothing does. On a GPU the passes become the largest that then fit: small ones keep it waiting for its
    launches.
    """
    choices = [training.having(offload=offload) for offload in offloads(training.config, training.on_gpu)]
    chosen = next((choice for choice in choices if room.lacks(choice) <= 0), None)
    if chosen is None:
        return Verdict(choices[0], room)
    wider = (chosen.having(**settings) for settings in _passes(training)) if training.on_gpu else ()
    ample = replace(room, device=int((1 - GAPS) * room.device))
    return Verdict(next((choice for choice in wider if ample.lacks(choice) <= 0), chosen), room)


def _passes(training: Training) -> Iterator[dict[str, object]]:
    """List what --micro-batch-tokens and --logits-chunk-mb may become where they are not given, the fastest first."""
    config = training.config
    for tokens in (*GPU_TOKENS, config.pass_tokens):
        yield {
            "micro_batch_tokens": config.micro_batch_tokens or tokens,
            "logits_chunk_mb": config.logits_chunk_mb or GPU_LOGITS_MB,
        }


def _changes(training: Training, most: int | None) -> Iterator[list[Way]]:
    """Yield the kinds of changes, each from the smallest to the largest, with at most as many ranks."""
    config = training.config
    yield [("", training)]
    if training.on_gpu and not config.keeps_tensors_whole:
        wider = [size for size in (2, 4, 8, 16, 32, 64) if size > training.shard]
        yield [_over(training, size) for size in wider if most is None or size * training.tp <= most]
        for offload in OFFLOADS[OFFLOADS.index(training.offload) + 1 :]:
            yield [(f"--offload {offload}", training.having(offload=offload))]
    if config.sync_gradients == "last" and training.is_sharded:
        yield [("--sync-gradients each", training.having(sync_gradients="each"))]
    if not config.reshard_after_forward:
        yield [("--reshard-after-forward", training.having(reshard_after_forward=True))]
    if config.kl_coef > 0:
        yield [("--kl-coef 0 (no reference model)", training.having(kl_coef=0.0))]
    if (
        config.optimizer == "adamw"
        and not config.bridge.trains_adapter
        and training.tp == 1
        and not training.is_sharded
    ):
        yield [("--optimizer adafactor", training.having(optimizer="adafactor"))]
    if not (config.bridge.trains_adapter or config.bridge.same_devices or config.batch_invariant):
        lora = MODES["lora"].model_validate({})
        yield [(ADAPTER, training.having(bridge=lora))]


def _over(training: Training, size: int) -> Way:
    """Spread the weights over `size` shards."""
    ranks = max(size * training.tp, training.ranks)
    more = f"--trainer-ranks {ranks} ({ranks} GPUs for the trainer)" if ranks > training.ranks else ""
    flag = f"--fsdp-size {size}" if training.config.fsdp_size or not more else ""
    return f"{more} {flag}".strip(), replace(training, ranks=ranks).having(fsdp_size=size)


def less_activations(config: TrainerConfig) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield changes after which a step holds fewer activations, as flags and settings, the smallest first: none."""
    yield "", {}
    words: str = ""
    settings: dict[str, object] = {}
    if not config.gradient_checkpointing:
        words, settings = "--gradient-checkpointing", {"gradient_checkpointing": True}
        yield words, settings
    for tokens in (1024, 512, 256):
        if tokens < config.pass_tokens:
            yield f"{words} --micro-batch-tokens {tokens}".strip(), settings | {"micro_batch_tokens": tokens}
