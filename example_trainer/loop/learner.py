"""What a trainer computes: gradients, updates and log-probabilities, on one device or by all ranks together.

    a batch's sequences ──deal──▶ this rank's micro-batches ──▶ gradients, summed over ranks ──clip──▶ update

Every rank holds a Learner, over its own shards of the weights. Methods marked `collective` run on all of them when rank
0 calls them (ranks/ranks.py). With one rank in float32 the model is not sharded and FSDP2 is not used.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atroposlib.errors import AtroposError
from atroposlib.processes.malloc import give_back_freed_memory, keep_freed_memory
from atroposlib.wire.bridge import BroadcastOffer, Manifest, SharedRank
from atroposlib.wire.folders import SHARDS
from example_trainer.bridges.direct import CannotSend, RowSender
from example_trainer.data.batching import Sequence
from example_trainer.data.packing import MicroBatch, micro_batches, of_sequences, with_old_logprobs
from example_trainer.data.routing_replay import routing_of
from example_trainer.exact.check import Comparison, Served
from example_trainer.exact.model import make_exact
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import Metrics
from example_trainer.loss.offline_gradients import offline_gradients
from example_trainer.model.cpu_kernels import kernels_of_run, take_repeatable_products, use_kernels
from example_trainer.model.loading import ModelError, load_tokenizer
from example_trainer.model.memory_check import settled_config
from example_trainer.model.policy import Policy, token_logprobs
from example_trainer.model.rounded import rounded_weights
from example_trainer.model.tensor_parallel import sum_partial_gradients
from example_trainer.optim.average import drop_average, take_average
from example_trainer.optim.optimizer import clip_gradients, divide_gradients, make_optimizer, set_learning_rate, update
from example_trainer.ranks.partition import has_tp
from example_trainer.ranks.place import Place
from example_trainer.ranks.ranks import Ranks, collective
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.by_rank import LiveModel, RankCopy, SharedRanks
from example_trainer.weights.checkpoint import Progress, restore, resumed
from example_trainer.weights.fsdp import expect_packed, fsdp_modules, reshard
from example_trainer.weights.gathered import RankSends, RowExchange, whole_model
from example_trainer.weights.load import load_sharded, load_trained, read_into, start_policy
from example_trainer.weights.optimizer_state import State, generators, parts, whole
from example_trainer.weights.shards import ShardWriter, Written
from example_trainer.weights.shared import SharedWeights
from example_trainer.weights.written import CheckpointError, TrainedModel, writing
from vllm_patching.free_memory import available_memory
from vllm_patching.transport import describe

HOST_RESERVE = 1 << 30  # bytes of host memory for each rank that a copy for a checkpoint leaves free


class Learner:
    """One rank's part. Rank 0 calls `resolve` and `load`, connects the bridge, calls `begin`, and then gradients, clip
    and update or discard, step by step.
    """

    trained: TrainedModel
    config: TrainerConfig  # final once it is resolved

    def __init__(self, config: TrainerConfig, device: torch.device, ranks: Ranks) -> None:
        self.ranks = ranks
        self.config = config
        self.device = device
        self.in_shared_memory = False  # whether the weights are a vLLM server's own
        self.comparison = Comparison()  # of the log-probabilities computed last, over all ranks
        self._served: Served | None = None  # as which vLLM the models compute
        self._writer = ShardWriter()
        self._rows: RowExchange | None = None
        self._places: Mapping[str, Tensor] = {}  # of the rows that are gathered; on rank 0

    @collective
    def resolve(self, checkpoint: str) -> None:
        """Complete the configuration on every rank, before anything is loaded: what memory decides, and what the run of
        `checkpoint` did, unless it is empty. Raises TrainerError if nothing fits, or if the flags ask for other bits.
        """
        config = resumed(self.config, Path(checkpoint)) if checkpoint else self.config
        config = settled_config(config, self.device, self.ranks, Place.of_this_process().local_size)
        self.config = config.model_copy(update={"share_prefixes": config.shares_prefixes})

    def load_into(self, storage: SharedWeights | SharedRanks | None, source: str) -> None:
        """Load the model of `source`, a hub id or a directory, where its weights live: into memory of its own, or into
        that of a vLLM server, which gets the values at the first sync. Raises ModelError or AdapterError.
        """
        self.in_shared_memory = storage is not None
        if isinstance(storage, SharedRanks):
            self.load_over(source, storage.workers)
        elif storage is None:
            self.load(source)
        else:
            self.trained = load_trained(self.config, source, self.device, storage)

    @collective
    def load(self, source: str) -> None:
        """Load the model of `source` into memory of the ranks' own. Raises ModelError or AdapterError."""
        if self.ranks.mesh is None:
            self.trained = load_trained(self.config, source, self.device)
        else:
            self.trained = load_sharded(
                self.config, source, self.device, self.ranks.mesh, self.gather, self._sends, self.prompt_logprobs
            )
            parameters = dict(self.trained.model.named_parameters())
            self._sender = RowSender(parameters, self.device, self.ranks.mesh)

    @property
    def _sends(self) -> RankSends:
        return RankSends(self.join_senders, self.send_rows, self.leave_senders)

    @collective
    def load_over(self, source: str, workers: list[SharedRank]) -> None:
        """Load the model of `source` over the memory of vLLM's ranks, each over one: by `write_start` it gets its
        values. Raises ModelError.
        """
        assert self.ranks.mesh is not None
        worker = workers[self.ranks.rank]
        self._copy = RankCopy(self.config, source, worker, self.device, self.ranks.mesh)
        form = whole_model(self.gather, self.device)
        self.trained = LiveModel(
            self._copy.policy.model,
            load_tokenizer(source),
            form,
            sharded=self._copy.policy,
            gather=self.gather,
            sends=self._sends,
            device=self.device,
            logprobs=self.prompt_logprobs,
            write_start=self.write_start,
            settle=self.settle,
            parted=lambda: self.ranks.parted,
        )

    @collective
    def write_start(self) -> None:
        """Write the start weights into vLLM's memory."""
        self._copy.write_start()

    @collective
    def settle(self, first: bool) -> list[int]:
        """Return when every rank's device has written its weights, and all of them still lie in vLLM's memory; how many
        each rank has there. After the first writing, check the model too. Raises ModelError.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        inside, count = self._copy.inside()
        if inside != count:
            raise ModelError(
                f"{count - inside} of {count} parameters no longer lie in vLLM's memory. This is a bug: please report"
                " it"
            )
        if first:
            expect_packed(self._copy.policy, self.device, torch.float32, self.config.seq_len)
        return [int(each) for each in self.ranks.rows(torch.tensor([inside]))]

    @collective
    def begin(self, checkpoint: str, served_dtype: str = "float32") -> None:
        """Make what updates the weights, which are where they stay; with the moments and generators of `checkpoint`,
        unless it is empty. vLLM computes in `served_dtype`.
        """
        config = self.config
        self._policy = self.trained.policy
        self._policy.routing = routing_of(self.trained.model, config.routing_replay)
        self._reference = self._start_policy() if config.kl_coef > 0 else None
        self.optimizer = make_optimizer(self._policy.parameters(), config)
        self.progress = Progress(share_prefixes=config.shares_prefixes, evaluated=0)
        if checkpoint:
            restored = restore(Path(checkpoint), self.optimizer, self.trained.model, self.ranks.rank)
            ends_early = restored.ends_early_after if config.stop_when_flat else None
            if not config.ema_decay:
                drop_average(self.optimizer)
            self.progress = replace(restored, share_prefixes=config.shares_prefixes, ends_early_after=ends_early)
        if config.deterministic and self.device.type == "cpu":
            take_repeatable_products(self.trained.model)
        saved = self.progress.kernels if checkpoint else None
        kernels = kernels_of_run(config, self.trained.model, self.device, self.ranks, saved, served_dtype)
        self._kernels = kernels
        use_kernels(self._policy, kernels)
        if self._reference is not None:
            use_kernels(self._reference, kernels)
        self.progress = replace(self.progress, kernels=kernels)
        if self.device.type == "cpu":  # after the copies that loading makes, which are given back
            keep_freed_memory()

    def compute_as(self, served: Served) -> None:
        """Have the policy, and the start model that it is compared with, compute as such a vLLM does. Raises
        NotInvariant, naming what is not covered.
        """
        self._served = served
        for policy in filter(None, (self._policy, self._reference)):
            _compute_as(served, policy)

    @collective
    def with_old_logprobs(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences with the log-probabilities that the policy gives their trained tokens as it is now. They are
        compared with the sampler's.
        """
        completed, self.comparison = self._with_logprobs_of(self._policy, sequences)
        return completed

    @collective
    def with_start_logprobs(self, parts: list[list[Sequence]]) -> list[list[Sequence]]:
        """The same of each part by the start model, which is loaded for it where the run has been resumed."""
        start = self._reference or (self._policy if self.progress.updates == 0 else None)
        if start is not None:
            return [self._with_logprobs_of(start, sequences)[0] for sequences in parts]
        start = self._start_policy()
        use_kernels(start, self._kernels)
        if self._served is not None:
            _compute_as(self._served, start)
        completed = [self._with_logprobs_of(start, sequences)[0] for sequences in parts]
        del start
        give_back_freed_memory()
        return completed

    def _start_policy(self) -> Policy:
        return start_policy(self.config, self.device, self.ranks.mesh, self.trained.model.dtype)

    def _with_logprobs_of(self, policy: Policy, sequences: list[Sequence]) -> tuple[list[Sequence], Comparison]:
        """The sequences with the log-probabilities that a policy gives their trained tokens, and these beside the
        sampler's.
        """
        config, mine, training = self.config, Comparison(), policy.model.training
        policy.model.eval()  # no dropout of an adapter, as in vLLM
        for batch in self._micro_batches(sequences):
            logprobs = token_logprobs(policy, batch, config.logits_mb)
            if batch.counted:
                mine.add(batch.targets, batch.sampler_logprobs, logprobs)
        policy.model.train(training)
        reshard(policy)
        comparison = mine.of_all(self.ranks)
        _, _, column = comparison.columns()
        completed = with_old_logprobs(
            sequences, column.numpy(), config.pass_tokens, self.ranks.shares, config.shares_prefixes
        )
        return completed, comparison

    @collective
    def gradients(self, sequences: list[Sequence], loss_divisor: float) -> Metrics:
        """Put the gradient of the tokens' weighted losses over `loss_divisor` into the parameters' `.grad`."""
        comparison = Comparison()
        measured = batch_gradients(
            self._policy,
            self._micro_batches(sequences),
            self.config,
            reference=self._reference,
            chunk_mb=self.config.logits_mb,
            loss_divisor=loss_divisor,
            comparison=comparison,
            ranks=self.ranks,
            before_pass=self._before_pass,
        )
        self.comparison = comparison.of_all(self.ranks)
        return measured

    @collective
    def offline_gradients(self, sequences: list[Sequence], loss_divisor: float) -> Metrics:
        """Add the gradient of offline examples, each of which counts as its advantages say, to the parameters'
        `.grad`.
        """
        return offline_gradients(
            self._policy,
            self._micro_batches(sequences),
            loss_divisor,
            chunk_mb=self.config.logits_mb,
            ranks=self.ranks,
            before_pass=self._before_pass,
        )

    def by_sequence(self, sequences: list[Sequence], comparison: Comparison) -> list[NDArray[np.float32]]:
        """Split the comparison by sequence: the trainer's log-probabilities of each sequence's trained tokens."""
        if not sequences:
            return []
        config, (_, _, column) = self.config, comparison.columns()
        return of_sequences(sequences, column.numpy(), config.pass_tokens, self.ranks.shares, config.shares_prefixes)

    @collective
    def clip(self) -> float:
        """Complete the gradients, and scale them to at most --max-grad-norm; their L2 norm before, over all ranks. Call
        it once for each update.
        """
        mesh = self.ranks.mesh
        if mesh is not None and has_tp(mesh):
            sum_partial_gradients(self.trained.model, mesh)
        return clip_gradients(self.optimizer, self.config.max_grad_norm, mesh)

    @collective
    def load_weights(self, folder: str) -> None:
        """Give the weights the values that a directory of this run's has, for good. Raises ModelError or
        AdapterError.
        """
        read_into(self.trained.model, Path(folder))

    @collective
    def divide(self, divisor: float) -> None:
        """Divide the gradients, which were computed over a divisor of 1."""
        divide_gradients(self.optimizer, divisor)

    @collective
    def give_back(self) -> None:
        """Give the system the memory that steps have freed."""
        give_back_freed_memory()

    @collective
    def discard(self) -> None:
        """Drop the gradients: the weights stay."""
        self.optimizer.zero_grad(set_to_none=True)

    @collective
    def update(self, rate: float) -> None:
        """Step on the clipped gradients, at this learning rate."""
        set_learning_rate(self.optimizer, rate)
        update(self.optimizer)

    @collective
    def take_average(self) -> None:
        """Give the weights the values of their average over the updates, of a run with --ema-decay."""
        take_average(self._policy.parameters(), self.optimizer)

    @collective
    def begin_save(self, folder: str) -> None:
        """Copy this rank's part of weights, moments and generators, and begin to write it to `folder`/shards. Raises
        CheckpointError.
        """
        shards = Path(folder) / SHARDS
        if not shards.is_dir():
            raise CheckpointError(f"{shards} is not there: give a --save-path that all trainer ranks share")
        mine = parts(self.trained.model, self.optimizer, self.ranks.mesh, self.ranks.rank)
        with writing(Path(folder)):  # the copy may find no memory
            room = available_memory() // Place.of_this_process().local_size - HOST_RESERVE
            self._writer.start(shards / f"rank_{self.ranks.rank}.safetensors", mine, room)

    @collective
    def saved(self) -> list[Written]:
        """The state of each rank's part so far."""
        line = msgspec.json.encode(self._writer.written) + b"\n"
        lines = self.ranks.rows(torch.frombuffer(bytearray(line), dtype=torch.uint8))
        return msgspec.json.Decoder(Written).decode_lines(lines.numpy().tobytes())

    @collective
    def whole_moments(self) -> State:
        """On rank 0, the optimizer's state, whole."""
        return whole(self.optimizer, keep=self.ranks.leads)

    @collective
    def generators(self) -> dict[str, list[Tensor]]:
        """The states of the random generators, each of every rank."""
        return {
            name: [row.clone() for row in self.ranks.rows(state).view(self.ranks.size, -1)]  # torch reads no views
            for name, state in generators().items()
        }

    def close(self) -> None:
        """Leave what is being written as it is."""
        self._writer.stop()

    @collective
    def prompt_logprobs(self, tokens: list[int]) -> Tensor:
        """Log-probabilities of all tokens but the first, [n - 1], of a sharded model."""
        row = _unscored([tokens], [list(range(len(tokens) - 1))], self.device)
        self.trained.model.eval()  # no dropout of an adapter, as in vLLM
        logprobs = token_logprobs(self.trained.policy, row, self.config.logits_mb).cpu()
        self.trained.model.train()
        reshard(self.trained.policy)
        return logprobs

    @collective
    @torch.no_grad()
    def logits(self, sequences: list[list[int]], rows: list[list[int]], served_dtype: str) -> Tensor:
        """Logits, float32 [all rows, vocabulary] on the CPU, after each sequence's tokens at its `rows`, by the weights
        that vLLM gets: rounded to `served_dtype`.
        """
        self.trained.model.eval()  # no dropout of an adapter, as in vLLM
        with rounded_weights(self.trained.model, getattr(torch, served_dtype)):
            logits = self.trained.policy.logits(_unscored(sequences, rows, self.device)).float().cpu()
        self.trained.model.train()
        reshard(self.trained.policy)
        return logits

    def gather(self, places: Mapping[str, Tensor]) -> None:
        """On rank 0, put whole parameters into these flat tensors, by name (weights/gathered.py)."""
        self._places = places
        self.bring_rows(list(places), [str(place.dtype).removeprefix("torch.") for place in places.values()])

    @collective
    def bring_rows(self, names: list[str], dtypes: list[str]) -> None:
        """Every rank's part of `gather`."""
        if self._rows is None:
            assert self.ranks.mesh is not None
            self._rows = RowExchange(self.trained.policy, self.device, self.ranks.mesh)
        self._rows.bring(names, dtypes, self._places)

    @collective
    def join_senders(self, offer: BroadcastOffer, manifest: Manifest) -> list[str]:
        """Have every rank join the workers of a server, to which it sends what it holds. The ranks' failures."""
        return self._failures(partial(self._sender.join, offer, manifest))

    @collective
    def send_rows(self, session: str) -> list[str]:
        """Have every rank send what it holds to the workers of a session, and wait until they have it. The ranks'
        failures.
        """
        return self._failures(partial(self._sender.send, session))

    @collective
    def leave_senders(self, session: str) -> None:
        """Have every rank let go of the workers of a session."""
        self._sender.leave(session)

    def _failures(self, act: Callable[[], None]) -> list[str]:
        """Run `act`, and return on every rank what of it failed on which rank. Peers are servers' here, so their
        loss ends no rank; how long they may take is the bridge's limit.
        """
        line = torch.empty(0, dtype=torch.uint8)
        try:
            act()
        except AtroposError:
            raise
        except (RuntimeError, CannotSend) as error:
            failure = msgspec.json.encode(f"trainer rank {self.ranks.rank}: {describe(error)}")
            line = torch.frombuffer(bytearray(failure + b"\n"), dtype=torch.uint8)
        self.ranks.meet()
        return msgspec.json.Decoder(str).decode_lines(self.ranks.rows(line).numpy().tobytes())

    def _micro_batches(self, sequences: list[Sequence]) -> list[MicroBatch]:
        """This rank's share of them."""
        config, ranks = self.config, self.ranks
        return micro_batches(
            sequences, config.pass_tokens, self.device, ranks.share, ranks.shares, config.shares_prefixes
        )

    def _before_pass(self, is_last: bool) -> None:
        """Tell FSDP2 what happens to gathered weights and gradients after this micro-batch."""
        config = self.config
        for module in fsdp_modules(self._policy):
            module.set_is_last_backward(is_last or config.sync_gradients == "each")  # frees what sums
            module.set_requires_gradient_sync(is_last or config.sync_gradients == "each", recurse=False)
            module.set_reshard_after_backward(is_last or config.reshard_after_forward, recurse=False)


def _compute_as(served: Served, policy: Policy) -> None:
    make_exact(policy.model, getattr(torch, served.dtype), served.tp_size)


def _unscored(sequences: list[list[int]], rows: list[list[int]], device: torch.device) -> MicroBatch:
    """Sequences packed to be looked at, not trained on. Of each, `rows` are the places whose next token is predicted; a
    sequence is fed as far as the last of them.
    """
    fed = [tokens[: max(places) + 1] for tokens, places in zip(sequences, rows, strict=True)]
    begins = np.cumsum([0, *(len(tokens) for tokens in fed)])
    targets = [(*tokens, 0)[place + 1] for tokens, places in zip(sequences, rows, strict=True) for place in places]
    nothing = torch.zeros(len(targets), device=device)
    return MicroBatch(
        input_ids=torch.tensor([[token for tokens in fed for token in tokens]], device=device),
        position_ids=torch.cat([torch.arange(len(tokens), device=device) for tokens in fed])[None],
        lengths=tuple(len(tokens) for tokens in fed),
        rows=torch.tensor(
            [int(begin) + place for begin, places in zip(begins, rows, strict=False) for place in places], device=device
        ),
        targets=torch.tensor(targets, device=device),
        sampler_logprobs=nothing,
        old_logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        temperatures=torch.ones_like(nothing),
        reference_logprobs=nothing,
    )
