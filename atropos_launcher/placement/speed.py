"""How fast a run can be on GPUs, by arithmetic from their data sheets: what a step takes, and which way of sharing
vLLM's GPUs out samples the most. Nothing here was measured but the trainer's share of a GPU's peak.

    a token of each answer   weights and KV cache are read once; ranks of a server add two sums a layer
    training                 6 operations for each weight and token, 8 with gradient checkpointing, and attention's
    sync                     the weights go to each server once, at the same time

A card is known by its memory alone, which is what --gpus tells.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from atropos_launcher.placement.gpus import Need, Placement, ServerPlace, trainer_ranks
from atroposlib.wire.bridge import DTYPE_BYTES
from example_trainer.memory.model_size import ModelSize
from example_trainer.memory.plan import GB, VLLM_OWN, Serving
from example_trainer.settings.bridges import Grouped

SUM_S = 10e-6  # of a sum over ranks, whatever its size: assumed, not measured
TRAINED_SHARE = 0.27  # of a GPU's peak, as 1.7B reached on one H100: docs/benchmarks/gpu.md
ALIKE = 0.12  # difference of memory up to which a GPU is taken for a known card
CLEARLY = 1.1  # times as many tokens per second for which a run takes more servers


@dataclass(frozen=True)
class Card:
    """The data sheet of a GPU: dense bfloat16 operations, and bytes of its memory and of its link to another GPU each
    way, per second.
    """

    name: str
    memory: int
    operations: float
    bandwidth: float
    link: float


CARDS = (
    Card("RTX 4090", 24 * GB, 165e12, 1.008e12, 32e9),
    Card("A100 of 40 GB", 40 * GB, 312e12, 1.555e12, 300e9),
    Card("L40S", 48 * GB, 362e12, 0.864e12, 32e9),
    Card("H100", 80 * GB, 989e12, 3.35e12, 450e9),
    Card("H200", 141 * GB, 989e12, 4.8e12, 450e9),
    Card("B200", 180 * GB, 2250e12, 8.0e12, 900e9),
)


def card_of(memory: int) -> Card | None:
    """The known card with about as many bytes of memory; None where there is none."""
    nearest = min(CARDS, key=lambda card: abs(math.log(memory / card.memory)) if memory else 0.0)
    return nearest if memory and abs(memory / nearest.memory - 1) <= ALIKE else None


def active_weights(size: ModelSize, tokens: float) -> float:
    """Weights that `tokens` tokens at once are multiplied by: of a mixture of experts those that any of them chooses,
    as if each chose at random. An embedding that is not the head, too, is only looked up.
    """
    multiplied = size.count - (0 if size.tied else math.prod(size.embedding))
    experts = [shape for name, shape in size.shapes.items() if ".experts." in name]
    if not experts or not size.experts_per_token:
        return float(multiplied)
    of_experts = sum(map(math.prod, experts)) * size.count / sum(map(math.prod, size.shapes.values()))
    idle: float = (1 - size.experts_per_token / experts[0][0]) ** tokens
    return multiplied - of_experts * idle


@dataclass(frozen=True)
class Sampling:
    """Equal vLLM servers, each `one` rank or several, that sample `answers` at once in all; `cache` are the bytes of
    each rank's KV cache, and answers are half as long as they may become.
    """

    one: Serving
    card: Card
    servers: int
    answers: int
    cache: int
    most: int = 256  # answers of a server at once

    @property
    def rows(self) -> int:
        """Answers that a server samples at once: as many as it has to, may, and has room for."""
        held = int(self.cache // max(1, self.one.cache_of_one // 2))
        return max(1, min(-(-self.answers // self.servers), self.most, held))

    @property
    def token_s(self) -> float:
        """Seconds in which a server adds a token to each of its answers, at least."""
        one, size, card = self.one, self.one.size, self.card
        active = active_weights(size, self.rows) / one.ranks
        read = active * DTYPE_BYTES[one.dtype] + self.rows * one.cache_of_one / 2
        multiplied = 2 * self.rows * active_weights(size, 1) / one.ranks
        summed = DTYPE_BYTES[one.dtype] * self.rows * size.hidden * 2 * (one.ranks - 1) / one.ranks / card.link
        sums = 2 * size.layers * (SUM_S + summed) if one.ranks > 1 else 0.0
        return max(read / card.bandwidth, multiplied / card.operations) + sums

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of all servers, at most."""
        return min(self.servers * self.rows, self.answers) / self.token_s


def sampling(need: Need, placement: Placement) -> Sampling | None:
    """How fast the vLLM servers of a placement sample a batch; None without GPUs that are known, and for servers that
    differ.
    """
    card = card_of(need.gpu) if placement.on_gpus else None
    if card is None or len({len(server.gpus) for server in placement.servers}) != 1:
        return None
    config, serving = need.config, need.serving(placement)
    cache = int(need.share(placement) * need.gpu) - serving.weights - serving.staging - VLLM_OWN
    answers = config.batch_size * config.gradient_accumulation_steps
    return Sampling(serving, card, len(placement.servers), answers, max(0, cache))


def training_s(need: Need, placement: Placement, card: Card) -> float:
    """Seconds of a training step on answers of full length, about."""
    config, size = need.config, need.size
    tokens = config.batch_size * config.gradient_accumulation_steps * config.seq_len
    passes = 8 if config.gradient_checkpointing else 6
    attention = passes * size.layers * size.out("q_proj") * config.seq_len  # causal: half of all pairs, two products
    operations = tokens * (passes * active_weights(size, 1) + attention)
    return operations / (trainer_ranks(config, placement) * TRAINED_SHARE * card.operations)


def sync_s(need: Need, placement: Placement, card: Card) -> float | None:
    """Seconds of a broadcast of all weights, at least; None for a bridge that sends none over a link, and over a
    network, whose speed no data sheet of a card has.
    """
    if not isinstance(need.config.bridge, Grouped) or placement.one_server_each:
        return None
    return need.size.count * DTYPE_BYTES[need.servers[0].dtype] / card.link


def layouts(need: Need, placement: Placement) -> dict[int, Sampling]:
    """Ways to share vLLM's GPUs out among equal servers, by their number: as many servers as there are GPUs or fewer,
    of those whose ranks can split the model and that fit. None on several machines.
    """
    gpus, found = len(placement.vllm), {}
    if placement.one_server_each:
        return {}
    for servers in [count for count in range(1, gpus + 1) if gpus % count == 0]:
        each = gpus // servers
        places = tuple(ServerPlace(placement.vllm[at : at + each]) for at in range(0, gpus, each))
        other = replace(placement, servers=places)
        alike = replace(need, servers=need.servers[:1] * servers)
        if alike.fits(other) and (rate := sampling(alike, other)) is not None:
            found[servers] = rate
    return found


def best_layout(ways: Mapping[int, Sampling]) -> int:
    """The fewest servers that no other number beats clearly. `ways` has at least one."""
    most = max(way.tokens_per_s for way in ways.values())
    return min(count for count, way in ways.items() if way.tokens_per_s * CLEARLY >= most)


def speed_lines(need: Need, placement: Placement, new_tokens: int | None = None, on_policy: bool = False) -> list[str]:
    """Say for --dry-run what a step takes by arithmetic, and what other layouts of vLLM's GPUs would sample; nothing
    where a card is not known. `new_tokens` of an answer, at most, where that is known. `on_policy`: no environment
    samples while the trainer works.
    """
    chosen = sampling(need, placement)
    if chosen is None:
        return []
    config, card = need.config, chosen.card
    length = min(new_tokens or config.seq_len, config.seq_len)
    sampled, trained = chosen.answers * length / chosen.tokens_per_s, training_s(need, placement, card)
    told, peak = f"{chosen.answers} answers of {length} tokens", f"{TRAINED_SHARE:.0%} of the peak"
    sequences = f"training on {chosen.answers} sequences of {config.seq_len}"
    offload = need.verdict(placement).training.offload
    peak += f", as 1.7B on one H100{'' if offload == 'none' else f', without what --trainer.offload {offload} costs'}"
    lines = [
        f"Time of a step by arithmetic, not measured (GPUs with this memory are taken for {card.name}):",
        f"  {f'sampling {told}':<46} at least {sampled:>8.3f} s: at most {chosen.tokens_per_s:,.0f} tokens/s",
        f"  {sequences:<46} about    {trained:>8.3f} s: {peak}",
    ]
    if (sent := sync_s(need, placement, card)) is not None:
        lines.append(f"  {'broadcast of all weights':<46} at least {sent:>8.3f} s, while sampling continues")
    together = not (placement.is_shared or on_policy)
    lines.append(_whole_run(config.training_steps, sampled, trained, placement.gpus, together))
    ways = layouts(need, placement)
    if len(ways) > 1:
        told = "; ".join(
            f"{count} of {way.one.ranks} GPU{'s' if way.one.ranks > 1 else ''}: {way.tokens_per_s:,.0f}"
            f"{' (this run)' if count == chosen.servers else ''}"
            for count, way in ways.items()
        )
        lines.append(f"  Servers on vLLM's GPUs, at most tokens/s: {told} (--vllm.count N)")
    return lines


def _whole_run(steps: int, sampled_s: float, trained_s: float, gpus: int, together: bool) -> str:
    hours = steps * (max(sampled_s, trained_s) if together else sampled_s + trained_s) / 3600
    how = f"sampling {'while' if together else 'and then'} training, without start and evaluations"
    return f"  {f'all {steps} steps on {gpus} GPUs':<46} at least {hours:>8.3f} h, {hours * gpus:.3f} GPU hours: {how}"
