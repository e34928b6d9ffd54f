"""Opens a run: what it waits for, what is refused before anything is loaded, and what is closed in the end.

batching API is up ──▶ weights loaded ──▶ bridge connected ──▶ moments, generators ──▶ files open ──▶ Run
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from atroposlib.logs import get_logger
from atroposlib.processes.lock_files import alone_in
from atroposlib.wire.batching import GroupRequirements, Registration
from atroposlib.wire.folders import MANIFEST
from example_trainer.bridges import Prepare, WeightBridge
from example_trainer.bridges.returning import ReturningBridge
from example_trainer.bridges.vllm_client import vllm_clients
from example_trainer.data.routing_replay import shape_of
from example_trainer.errors import TrainerError
from example_trainer.exact.check import Exactness
from example_trainer.loop.api_client import ApiClient
from example_trainer.loop.bad_data import RejectionBudget
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import examples_of, sides_of
from example_trainer.loop.run import Run
from example_trainer.loop.saves import Saves
from example_trainer.loop.timeline import Timeline
from example_trainer.output.metrics import open_batches, open_metrics, open_trained
from example_trainer.ranks.ranks import Ranks
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import expect_same_model, find_checkpoint, has_ended
from example_trainer.weights.written import remove_leftovers

HELD_S = 20.0  # for a killed trainer, whose memory the kernel still takes back

log = get_logger(__name__)

Watched = WeightBridge | Ranks | Saves


@contextmanager
def open_run(learner: Learner, prepare: Callable[[TrainerConfig], Prepare]) -> Iterator[Run]:
    """A run on rank 0, ready to start. `prepare` gives the bridge of the final configuration. Raises TrainerError."""
    watched = list[Watched]([learner.ranks])
    with ExitStack() as resources:
        resources.enter_context(the_only_trainer(learner.config))
        examples = examples_of(learner.config)
        resumed = resolved(learner)
        config = learner.config
        rejections = RejectionBudget(config.max_rejected_groups)
        api = resources.enter_context(closing(client_of(config, rejections, partial(sleep_beside, watched))))
        api.wait_until_up()
        source = resumed or config.model_name
        log.info("Loading %s on %s", source, learner.device)
        bridge = resources.enter_context(connected(learner, prepare(config), source))
        watched.append(bridge)
        learner.begin(resumed, bridge.served_dtype)
        done, model = learner.progress, learner.trained.model
        exactness = Exactness(config, bridge.served_dtype, done.kernels, done.mismatch)
        if exactness.served is not None:
            learner.compute_as(exactness.served)
        expect_work_left(learner, resumed)
        offline = sides_of(examples, config, learner.trained.tokenizer) if examples else []
        metrics = open_metrics(config, done.step + 1, resources, done.kernels)
        trained_file = open_trained(config, done.step + 1, resources)
        batches_file = open_batches(config, done.step + 1, resources)
        if config.overlap and not config.overlaps:
            log.info("Not computing before a batch is whole: it makes several updates, or recomputes log-probabilities")
        saves = Saves(config, learner, partial(sleep_beside, [learner.ranks]))  # the ranks write them, without vLLM
        resources.push(saves.leave)
        watched.append(saves)
        needs = requirements(config, model)
        timeline = Timeline(vllm_clients(config))
        yield Run(
            config,
            api,
            learner,
            bridge,
            exactness,
            saves,
            rejections,
            metrics,
            trained_file,
            needs,
            timeline,
            offline,
            batches_file=batches_file,
        )


def requirements(config: TrainerConfig, model: PreTrainedModel) -> GroupRequirements:
    """Return what a group must have for this model to be trained on it."""
    return GroupRequirements(
        vocab_size=model.config.get_text_config().vocab_size,
        trainable_only=True,
        logprobs_optional=not config.needs_sampler_logprobs,
        routing=shape_of(model),
        routing_required=config.routing_replay == "required",
        teacher_top_k=config.teacher_top_k,
    )


@contextmanager
def the_only_trainer(config: TrainerConfig) -> Iterator[None]:
    """While this lasts, no other trainer writes checkpoints or metrics where this one does. Waits for one that is
    about to end. Raises TrainerError that names the other.
    """
    of_metrics = "--metrics-path" if config.metrics_path else "--log-dir"
    with ExitStack() as held:
        # in the directory of checkpoints, as who may write there may not write beside it
        of_checkpoints = config.save_path, config.save_path / "checkpoints", "--save-path"
        for path, locked, flag in (of_checkpoints, (config.metrics_file, config.metrics_file, of_metrics)):
            waiting = partial(log.info, "Waiting at most %.0f s until %s is not written by %s", HELD_S, path)
            taken, other = partial(_taken, path, flag), f"choose another {flag}"
            held.enter_context(alone_in(locked, TrainerError, taken, remedy=other, patience_s=HELD_S, waiting=waiting))
        yield


def _taken(path: Path, flag: str, holder: str) -> str:
    return f"{path} is being written by {holder}, another trainer: end that one, or choose another {flag}"


def resolved(learner: Learner) -> str:
    """Complete the learner's configuration. Return the checkpoint that the run continues, empty for a fresh start.
    Raises TrainerError.
    """
    given = learner.config
    remove_leftovers(given.save_path)
    checkpoint = find_checkpoint(given.resume, given.save_path)
    if checkpoint:
        expect_same_model(checkpoint, given)
    learner.resolve(str(checkpoint or ""))
    return str(checkpoint or "")


def expect_work_left(learner: Learner, resumed: str) -> None:
    """Raise TrainerError if the checkpoint has done all steps, and its run has noted its end, with the trained model on
    the disk. A process that ended in between has left a run to finish.
    """
    config, done, early = learner.config, learner.progress.step, learner.progress.ends_early_after
    steps = min(early or config.training_steps, config.training_steps)
    if done < steps:
        return
    final = config.save_path / learner.trained.form.final / MANIFEST
    if done > steps or (final.exists() and has_ended(config.save_path, learner.progress)):
        if early == steps:
            raise TrainerError(
                f"{resumed} is of a run that ended at step {steps}, without a better policy: give --stop-when-flat 0 to"
                " continue"
            )
        raise TrainerError(
            f"{resumed} has done {done} of {steps} steps: raise --training-steps (--steps of `atropos train`) to"
            " continue"
        )
    log.info("%s has done all %d steps; what its run does at its end is left to do", resumed, done)


@contextmanager
def connected(learner: Learner, prepare: Prepare, source: str) -> Iterator[WeightBridge]:
    """The bridge that hands over what the learner trains, which has the weights of `source` (hub id or directory) then.

    With single copy the weights become those of `source` at the first sync.
    """
    config, prepared = learner.config, prepare(source, learner.device)
    with ExitStack() as resources:
        resources.callback(prepared.close)
        learner.load_into(prepared.storage, source)
        bridge = prepared.connect(learner.trained)
        if config.vllm_return_s and config.bridge.survives_vllm:
            servers, alone = vllm_clients(config), learner.ranks.size == 1
            bridge = ReturningBridge(
                bridge, servers, config.vllm_return_s, sync_in_check=alone, give_back=learner.give_back
            )
        yield resources.enter_context(closing(bridge))


def client_of(config: TrainerConfig, rejections: RejectionBudget, sleep: Callable[[float], None]) -> ApiClient:
    """The client of the batching API, which is not asked anything yet."""
    return ApiClient(
        config.atropos_url,
        registration(config),
        patience_s=config.api_timeout,
        token=config.atropos_token.get_secret_value() if config.atropos_token else None,
        sleep=sleep,
        on_rejected=rejections.note,
    )


def registration(config: TrainerConfig) -> Registration:
    """Build what the API is told about this run; the step it starts from is known later."""
    return Registration(
        wandb_group=config.wandb_group or config.save_path.name,
        wandb_project=config.wandb_project,
        batch_size=config.batch_size * config.gradient_accumulation_steps,  # rollouts
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=0,
        num_steps=config.training_steps,
    )


def sleep_beside(watched: Sequence[Watched], seconds: float) -> None:
    """Pause a wait for the API. Without vLLM no batch will ever come, and without the other ranks none can be trained
    on, so their errors are raised first. A checkpoint that is written meanwhile gets its name.
    """
    for each in watched:
        each.check()
    time.sleep(seconds)
