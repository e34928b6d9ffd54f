"""The GPUs of a run, once gpu_shares.py has shared them out: whether vLLM and the trainer fit their memory, and what
follows for their settings. On one GPU, vLLM takes 0.4 of its memory; without a GPU, both compute in float32.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from atropos_launcher.placement.this_machine import multiplies_bfloat16
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.servers import Tree, server_name
from atroposlib.wire.bridge import DTYPE_BYTES
from example_trainer.memory.fits import ADAPTER, Room, Verdict, fits, less_activations
from example_trainer.memory.model_size import BY_NAME, ModelSize
from example_trainer.memory.plan import (
    PROCESSES,
    SHARED_UTILIZATION,
    VLLM_OWN,
    VLLM_PROCESSES,
    MemoryItem,
    Serving,
    Training,
    amount,
    table,
    total,
)
from example_trainer.memory.tp_plans import MOST
from example_trainer.ranks.place import ranks_on_cpu
from example_trainer.settings.bridges import MODES, Adapter
from example_trainer.settings.config import TrainerConfig
from vllm_patching.free_memory import available_memory, total_memory

VOCABULARY_MULTIPLE = 64  # to which vLLM pads a vocabulary: vllm/model_executor/layers/vocab_parallel_embedding.py
MOST_OF_GPU = 0.95  # that vLLM is told to take of one
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ONE_PROCESS = "train with one process (--tp-size 1), which takes any split and dtype, or choose --bridge broadcast"


@dataclass(frozen=True)
class ServerPlace:
    """The GPUs of one vLLM server. `utilization` is the share of a GPU that it takes, where vLLM's default does not
    suit.
    """

    gpus: tuple[str, ...] = ()
    utilization: float | None = None


@dataclass(frozen=True)
class Placement:
    """GPUs as CUDA_VISIBLE_DEVICES names them; none without a GPU."""

    servers: tuple[ServerPlace, ...] = (ServerPlace(),)
    trainer: tuple[str, ...] = ()  # on the machine of rank 0
    others: tuple[tuple[str, ...], ...] = ()  # on each other machine that trains
    apart: bool = False  # whether no machine both trains and serves
    by_ranks: int = 1  # of a single copy with --tp-size: trainer ranks, one for each of vLLM's

    @property
    def training(self) -> tuple[tuple[str, ...], ...]:
        """List the trainer's GPUs on each machine that trains."""
        return (self.trainer, *self.others)

    @property
    def machines(self) -> int:
        """Count the machines that train."""
        return len(self.training)

    @property
    def vllm(self) -> tuple[str, ...]:
        """List the GPUs of all servers."""
        return tuple(gpu for server in self.servers for gpu in server.gpus)

    @property
    def gpus(self) -> int:
        """Count the GPUs of the run, one that serves and trains once."""
        if self.apart:
            return len(self.vllm) + sum(map(len, self.training))
        if self.machines > 1:  # whose GPUs have the same names
            return sum(len({*one.gpus, *mine}) for one, mine in zip(self.servers, self.training, strict=True))
        return len({*self.vllm, *self.trainer})

    @property
    def on_gpus(self) -> bool:
        return bool(self.vllm)

    @property
    def is_shared(self) -> bool:
        """Return whether vLLM and the trainer have a GPU in common."""
        return any(map(self.shares, range(len(self.servers))))

    def shares(self, index: int) -> bool:
        """Return whether this server and the trainer have a GPU in common."""
        beside = self.training[index] if self.machines > 1 and not self.apart else self.trainer
        return not self.apart and bool({*self.servers[index].gpus} & {*beside})

    @property
    def one_server_each(self) -> bool:
        """Return whether each machine that serves has one of the servers."""
        return self.apart or self.machines > 1

    @property
    def servers_here(self) -> int:
        """Servers on the machine of rank 0."""
        return 0 if self.apart else 1 if self.one_server_each else len(self.servers)


@dataclass(frozen=True)
class ServerNeed:
    """Holds what a run states about one vLLM server's memory."""

    max_model_len: int
    dtype: str
    utilization: float | None = None  # of a GPU
    staging_on_host: bool = False
    ranks: int = 1  # that the run asks for


@dataclass(frozen=True)
class Need:
    """Holds what the plan of a run is made of, the memory of one GPU, and what is free in host memory."""

    config: TrainerConfig
    size: ModelSize
    gpu: int
    servers: tuple[ServerNeed, ...]
    host: int | None = None  # None: what this machine has
    teacher: Serving | None = None  # that this machine starts, too, without a GPU
    teacher_ranks: int = 1

    @property
    def host_memory(self) -> int:
        """Bytes."""
        return available_memory() if self.host is None else self.host

    @property
    def memory_of_machine(self) -> int:
        """Bytes, free or not."""
        return total_memory() if self.host is None else self.host

    @property
    def disk(self) -> int:
        """Bytes that the run's checkpoints take at the most: of weights and moments, one more than are kept while it is
        written; of weights, the trained model, the best ones, those that were it at the last checkpoint, and what a
        bridge writes for vLLM. An adapter's are too small to count.
        """
        config = self.config
        if config.bridge.trains_adapter:
            return 0
        made = config.training_steps // config.checkpoint_interval if config.checkpoint_interval else 0
        states = min(made, config.keep_checkpoints + 1 if config.keep_checkpoints else made)
        models = 1 + 2 * config.keep_best + config.bridge.written_copies
        of_state = 16 if config.ema_decay else 12  # bytes per weight
        return (of_state * states + 4 * models) * self.size.count

    def share(self, placement: Placement, index: int = 0) -> float:
        """Return the share of a GPU's memory that a vLLM server takes."""
        beside_trainer = placement.shares(index)
        return self.servers[index].utilization or self.serving(placement, index).share(self.gpu, beside_trainer)

    def serving(self, placement: Placement, index: int = 0) -> Serving:
        """A rank of a vLLM server."""
        return Serving(
            self.config,
            self.size,
            self.servers[index].dtype,
            max(1, len(placement.servers[index].gpus)),
            placement.on_gpus,
            self.servers[index].max_model_len,
            self.servers[index].staging_on_host,
        )

    def host_staging(self, placement: Placement) -> int:
        """Bytes of host memory that all ranks of vLLM servers take for new weights, on the machine with the most."""
        servers = [self.serving(placement, index) for index in range(len(placement.servers))]
        taken = [serving.ranks * serving.host_staging for serving in servers]
        return max(taken) if placement.one_server_each else sum(taken)

    def verdict(self, placement: Placement) -> Verdict:
        """Tell whether a rank of the trainer fits what it may take."""
        same = self.config.bridge.same_devices
        ranks = trainer_ranks(self.config, placement)
        served = DTYPE_BYTES[self.servers[0].dtype]
        split = len(placement.vllm) if same and placement.on_gpus else placement.by_ranks
        training = Training(self.config, self.size, ranks, placement.on_gpus, served, split)
        staged = 0 if placement.apart else self.host_staging(placement)
        host = (self.host_memory - staged) // max(1, *ranks_of_machines(self.config, placement))
        if not placement.on_gpus:
            return fits(training, Room(host, host))
        beside = [index for index in range(len(placement.servers)) if placement.shares(index)]
        taken = max((int(self.gpu * self.share(placement, index)) for index in beside), default=0)
        return fits(training, Room(self.gpu - taken, host, ranks + len(placement.vllm) - 1))

    def refusal(self, placement: Placement, cache: int = 0) -> str | None:
        """Explain why vLLM or the trainer does not fit the GPUs, or without a GPU this machine; None where both do.
        `cache` is the KV cache of a rank of vLLM on a CPU.
        """
        if why_not := self.size.tp_refusal(self.config.tp_size):
            return why_not
        most = len({*placement.vllm, *placement.trainer}) - 1 if placement.on_gpus else MOST
        for split in {
            len(place.gpus) or asked.ranks for place, asked in zip(placement.servers, self.servers, strict=True)
        }:
            if why_not := self.size.split_refusal(split, "vLLM's --tensor-parallel-size", max(1, most)):
                return why_not
        if why_not := adapter_refusal(self.config, self.size, placement.on_gpus):
            return why_not
        if placement.by_ranks > 1 and (why_not := vocabulary_refusal(self.size, placement.by_ranks)):
            return f"{why_not}: {ONE_PROCESS}"
        if not placement.on_gpus:
            return self._refusal_of_machine(placement, cache)
        if lacks := self.serving_refusal(placement):
            return ": ".join(lacks)
        verdict = self.verdict(placement)
        if verdict.fits:
            return None
        return verdict.refusal(f"GPU {', '.join(placement.trainer)}", _for_launcher)

    def _refusal_of_machine(self, placement: Placement, cache: int) -> str | None:
        """Explain why the run does not fit a machine without a GPU, and what would; None where it does."""
        config, needed, size = self.config, self._needed(placement, cache), self.memory_of_machine
        if needed <= size:
            return None
        changed = [("", config)]
        if not (config.batch_invariant or config.bridge.external or config.bridge.trains_adapter):
            lora = config.model_copy(update={"bridge": MODES["lora"].model_validate({})})
            changed.append(("--bridge lora", lora))
        ways = [
            f"{words} {more.replace('--', '--trainer.')}".strip()
            for words, basis in changed
            for more, settings in less_activations(basis)
            if replace(self, config=basis.model_copy(update=settings))._needed(placement, cache) <= size
        ]
        taught, smaller = (" beside its teacher", "model or teacher") if self.teacher else ("", "model")
        return (
            f"training {config.model_name}{taught} here takes about {amount(needed)} of memory, and this machine has"
            f" {amount(size)}: "
            + (f"give {ways[0]}, or use a smaller {smaller}" if ways else f"use a smaller {smaller}")
        )

    def _needed(self, placement: Placement, cache: int) -> int:
        """Bytes that a run takes of a machine without a GPU."""
        return total(self._items_of_machine(placement, self.verdict(placement).training, cache))

    def scarcity(self, placement: Placement, cache: int) -> str | None:
        """Warn of a machine without a GPU that has too little free now; None where it has enough."""
        needed, free = (0 if placement.on_gpus else self._needed(placement, cache)), self.host_memory
        if needed <= free:
            return None
        return (
            f"Memory may not suffice: the run takes about {amount(needed)}, and {amount(free)} are free now. End other"
            " programs, or see the table of --dry-run"
        )

    def serving_refusal(self, placement: Placement) -> tuple[str, str] | None:
        """Explain why vLLM does not fit, and what to do; None where it does."""
        staged = self.host_staging(placement)
        if staged > self.host_memory:
            return (
                f"vLLM needs {amount(staged)} of host memory for --vllm.bridge-staging host, and"
                f" {amount(self.host_memory)} are free",
                "give --vllm.bridge-staging device, or use a smaller model",
            )
        for index in range(len(placement.servers)):
            serving, taken = self.serving(placement, index), self.share(placement, index)
            if serving.least <= taken * self.gpu:
                continue
            elsewhere, share = replace(serving, staging_on_host=True), serving.least / self.gpu
            ways = ["give vLLM more GPUs (--vllm.tensor-parallel-size)"]
            if share <= MOST_OF_GPU:
                ways.append(f"more of its GPU (--vllm.gpu-memory-utilization {math.ceil(100 * share) / 100})")
            if serving.staging and elsewhere.least <= taken * self.gpu:
                held = amount(serving.ranks * elsewhere.host_staging)
                ways.append(f"stage in host memory (--vllm.bridge-staging host, {held})")
            if serving.staging:
                ways.append("choose --bridge lora, which needs no staging")
            who = "vLLM" if len(placement.servers) == 1 else server_name(index, len(placement.servers))
            staging = f", {amount(serving.staging)} of it for the staging buffer," if serving.staging else ""
            return (
                f"{who} needs {amount(serving.least)} on each of {serving.ranks} GPU(s){staging} but a GPU has"
                f" {amount(self.gpu)} of which it may take {taken:.0%}",
                f"{', '.join(ways)}, or use a smaller model",
            )
        return None

    def lines(self, placement: Placement, cache: int, trains: bool = True) -> list[str]:
        """The tables of --dry-run: of a rank of each vLLM server and, of a run that `trains`, one of the trainer; of
        this machine where there is no GPU. `cache` is the KV cache of a rank of vLLM there.
        """
        verdict = self.verdict(placement) if trains else None
        lines = [f"Memory of {self.config.model_name}, {self.size.count / 1e6:.0f} M weights ({self.size.source}):"]
        if not placement.on_gpus:
            items = self._items_of_machine(placement, verdict.training if verdict else None, cache)
            return lines + table("This machine", items, self.host_memory)
        lines += self._tables_of_servers(placement)
        if verdict is not None:
            lines += [f"Each GPU of the trainer ({', '.join(placement.trainer)})", *verdict.table]
        return lines

    def _items_of_machine(self, placement: Placement, training: Training | None, cache: int) -> list[MemoryItem]:
        """What the services of a run take of a machine without a GPU; without `training` those of an evaluation."""
        here = max(1, ranks_of_machines(self.config, placement)[0])
        count = placement.servers_here
        items = []
        for alike, serving in self._alike(placement, count):
            # each of a server's ranks has a cache, and staging is made when a trainer comes
            caches = cache * max(placement.by_ranks, self.servers[alike[0]].ranks)
            kept = [item for item in serving.items(caches) if training is not None or item.kind != "vLLM's staging"]
            several = f"{count} x vLLM" if count > 1 else "vLLM"
            name = several if len(alike) == count else ", ".join(server_name(index, count) for index in alike)
            items += _of(name, kept, len(alike))
        if self.teacher is not None:
            items += _of("teacher", self.teacher.items(cache * self.teacher_ranks))
        if training is not None:
            ranks = f" of each of {training.ranks} ranks" if training.ranks > 1 else ""
            items += _of(f"trainer{ranks}", [*training.items, *training.host_items], here)
        servers = count + (self.teacher is not None)
        return [
            *items,
            MemoryItem("runtime", "the processes themselves, about", PROCESSES + (servers - 1) * VLLM_PROCESSES),
        ]

    def _alike(self, placement: Placement, count: int) -> Iterator[tuple[list[int], Serving]]:
        """Yield the first `count` servers, those together that are alike in a row, with a rank of theirs."""
        each = [(self.serving(placement, at), placement.shares(at), self.servers[at]) for at in range(count)]
        for (serving, *_), group in groupby(range(count), key=each.__getitem__):
            yield list(group), serving

    def _tables_of_servers(self, placement: Placement) -> list[str]:
        """One for each server, or for several in a row that are alike."""
        lines, count = [], len(placement.servers)
        for alike, serving in self._alike(placement, count):
            share = self.share(placement, alike[0])
            cache = max(0, int(share * self.gpu) - serving.weights - serving.staging - VLLM_OWN)
            held = [gpu for index in alike for gpu in placement.servers[index].gpus]
            gpus = ", ".join(dict.fromkeys(held)) + (" of a machine each" if len(set(held)) < len(held) else "")
            names = "vLLM" if count == 1 else ", ".join(server_name(index, count) for index in alike)
            lines += table(f"Each GPU of {names} ({gpus})", serving.items(cache), self.gpu)
            lines.append(f"  vLLM takes {share:.0%} of the GPU; the KV cache takes what remains of it")
            lines.append(f"  {serving.conversations(cache)}")
            if serving.host_staging:
                locked = MemoryItem("vLLM's staging", "vLLM: staging buffer, page-locked", serving.host_staging)
                lines += table(f"  and in host memory, each of {serving.ranks * len(alike)} rank(s)", [locked])
        return lines

    def fits(self, placement: Placement, without_offload: bool = False) -> bool:
        """Return whether vLLM and trainer both have what they need on GPUs."""
        verdict = self.verdict(placement)
        heads, kv_heads = self.size.heads or 0, self.size.kv_heads or 1
        for ranks in (len(server.gpus) for server in placement.servers):
            if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
                return False
        if without_offload and verdict.training.offload != "none":
            return False
        return self.serving_refusal(placement) is None and verdict.fits


def _of(name: str, items: Sequence[MemoryItem], count: int = 1) -> list[MemoryItem]:
    """The items of several that are alike, as a table of all services names them."""
    return [
        replace(item, what=f"{name}: {item.what.removeprefix('vLLM: ')}", nbytes=item.nbytes * count) for item in items
    ]


def _for_launcher(advice: str) -> str:
    """Flags of the trainer as the launcher takes them."""
    return re.sub(r"--(?!bridge |trainer-ranks )", "--trainer.", advice.replace(ADAPTER, "--bridge lora"))


def adapter_refusal(config: TrainerConfig, size: ModelSize, on_gpus: bool) -> str | None:
    """Explain why a model cannot train the adapter that is asked for, such as one of experts; None if it can."""
    bridge = config.bridge
    if not isinstance(bridge, Adapter):
        return None
    if not size.experts_per_token:
        return None if size.source == BY_NAME else _absent_layers(bridge.target_modules, size)
    if not on_gpus:
        return "vLLM has no adapters beside experts on CPUs: choose --bridge broadcast, or a model without experts"
    if not set(bridge.target_modules) - set(OF_ATTENTION):
        return None
    return (
        f"{config.model_name} is a mixture of experts, whose experts take no adapter: train the attention's with"
        f" --bridge.target-modules {','.join(OF_ATTENTION)}, or all weights with --bridge broadcast"
    )


def _absent_layers(modules: Sequence[str], size: ModelSize) -> str | None:
    names = ["lm_head.weight", *size.shapes]  # a head may be the embedding
    if any(f".{name}".endswith(f".{module}.weight") for name in names for module in modules):
        return None
    layers = sorted({name.split(".")[-2] for name in size.shapes if name.endswith("_proj.weight")})
    return (
        f"--bridge.target-modules {','.join(modules)}: this model has no such layer: give some of {', '.join(layers)}"
    )


def vocabulary_refusal(size: ModelSize, ranks: int) -> str | None:
    """Explain why a single copy by ranks cannot share the vocabulary; None if it can, or if its size is not known."""
    rows, multiple = size.embedding[0], math.lcm(VOCABULARY_MULTIPLE, ranks)
    if not size.shapes or rows % multiple == 0:
        return None
    return (
        f"single copy with --tp-size {ranks} takes a vocabulary that {multiple} divides, and vLLM pads that of this"
        f" model, of {rows} tokens"
    )


def ranks_of_single_copy(config: TrainerConfig) -> int:
    """Return how many ranks train a single copy with --tp-size, each of vLLM's by one of its own; else 1."""
    return config.tp_size if config.bridge.same_devices else 1


def trainer_ranks(config: TrainerConfig, placement: Placement) -> int:
    """Processes of the trainer."""
    alone = config.follows_vllm is not None or not placement.on_gpus
    if isinstance(config.trainer_ranks, int):
        return config.trainer_ranks
    return placement.machines * ranks_on_cpu(config) if alone else sum(map(len, placement.training))


def ranks_of_machines(config: TrainerConfig, placement: Placement) -> list[int]:
    """Processes of the trainer on each machine that trains: one for each of its GPUs, or as many on each."""
    if config.trainer_ranks == "auto" and config.follows_vllm is None and placement.on_gpus:
        return [len(gpus) for gpus in placement.training]
    return [trainer_ranks(config, placement) // placement.machines] * placement.machines


def served_dtype(run: RunFile, on_gpus: bool, by_ranks: int = 1) -> str:
    """Return the dtype that vLLM serves in, unless a server has its own."""
    if run.dtype not in (None, "auto"):
        return run.dtype
    # the bit-exact mode multiplies in float32 on CPUs, whatever the dtype
    is_faster = on_gpus or (run.dtype == "auto" and not run.batch_invariant and multiplies_bfloat16())
    return "bfloat16" if is_faster and by_ranks == 1 else "float32"


def dtype_of_server(run: RunFile, flags: Tree, on_gpus: bool, by_ranks: int = 1) -> str:
    """Return the dtype of a vLLM server with these flags, which may have its own; "auto" is taken for the run's."""
    own = flags.get("dtype")
    return served_dtype(run, on_gpus, by_ranks) if own in (None, "auto") else str(own)


def device_flags(run: RunFile, placement: Placement, index: int = 0) -> dict[str, object]:
    """The flags of a vLLM server that follow from the devices, below those of the run."""
    flags: dict[str, object] = {"dtype": served_dtype(run, placement.on_gpus, placement.by_ranks)}
    if placement.by_ranks > 1:
        flags["tensor_parallel_size"] = placement.by_ranks
    if not placement.on_gpus:
        return flags | {"block_size": 32, "max_num_seqs": 64}
    flags["max_num_seqs"] = 256
    server = placement.servers[index]
    if len(server.gpus) > 1:
        flags["tensor_parallel_size"] = len(server.gpus)
    if placement.shares(index):
        flags["gpu_memory_utilization"] = SHARED_UTILIZATION  # the trainer needs the rest
    if server.utilization is not None:
        flags["gpu_memory_utilization"] = server.utilization
    if MODES[run.kind].vllm_copies == 1:
        flags["bridge_staging"] = "none"
    return flags


def device_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of every service that follow from the devices."""
    return {} if placement.on_gpus else {"VLLM_CPU_KVCACHE_SPACE": environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}  # GiB


def device_bridge(run: RunFile, placement: Placement) -> dict[str, object]:
    """Settings of the bridge that follow from the devices."""
    shares = placement.is_shared and not MODES[run.kind].same_devices
    return {"backend": "gloo"} if shares and run.kind == "broadcast" else {}  # NCCL refuses two ranks on one GPU


def seen(gpus: tuple[str, ...]) -> dict[str, str]:
    """The variable by which a process sees these GPUs alone; as it is where there are none."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
