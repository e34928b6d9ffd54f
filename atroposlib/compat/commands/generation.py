"""The common part of `atropos-sft-gen` and `atropos-dpo-gen`: they take the trainer's place, and write what
environments send as text.

environments ──groups──▶ batching API ──GET /batch──▶ fetch_groups ──▶ records ──▶ FILE, one JSON object per line
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import Field

from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, BatchingApi, Flags
from atroposlib.clients.waiting import NotYet, Wait, wait_for
from atroposlib.config import Config, load_config
from atroposlib.envs.files.records import append_jsonl
from atroposlib.errors import AtroposError, one_line_errors, reaching
from atroposlib.files import expect_regular
from atroposlib.groups import rollouts_of
from atroposlib.logs import configure_logging, get_logger
from atroposlib.utils.tokenizers import Tokenizer, load_tokenizer
from atroposlib.wire import routes
from atroposlib.wire.batching import NOT_TRAINED, Registration, ScoredData
from atroposlib.wire.routes import Route

log = get_logger(__name__)

COLLECTOR = "atropos-collector"  # as which these commands register; a later one may follow
FOLLOWS_WITHIN_S = 5.0
FINISHED_S = 10.0  # without a request for a batch: a collector asks more often

R = TypeVar("R")


class GenerationConfig(Config):
    """Settings that both commands have."""

    api_url: str = Field(default="http://localhost:8000", description="Address of the batching API.")
    token: str = Field(default="", repr=False, description="Bearer token of the API, if it has one.")
    group_size: int = Field(default=2, ge=1, description="Group size of the environments.")
    max_token_len: int = Field(default=2048, ge=1, description="Longest sequence to accept, in tokens.")
    tokenizer: str = Field(
        default="NousResearch/DeepHermes-3-Llama-3-8B-Preview", description="Tokenizer that turns tokens into text."
    )
    save_messages: bool = Field(default=False, description="Write messages instead of prefix and completion.")
    num_seqs_to_save: int = Field(default=100, ge=1, description="Number of records to write.")
    allow_negative_scores: bool = Field(default=False, description="Also keep samples with scores below 0.")
    minimum_score_diff_max_min: float = Field(
        default=0.0, ge=0, description="Smallest difference between a group's best and worst score."
    )
    append_to_previous: bool = Field(default=False, description="Append to FILE if it exists.")
    tasks_per_step: int = Field(default=64, ge=1, description="Groups per batch.")
    take_over: bool = Field(
        default=False,
        description="Continue although a trainer has registered with this API; that trainer loses its batches.",
    )
    timeout: float = Field(default=1800.0, gt=0, description="Seconds to wait for the API, and for each batch.")


C = TypeVar("C", bound=GenerationConfig)


class GenerationError(AtroposError):
    """The command cannot continue; the message is one line."""


def run(
    config_cls: type[C], prog: str, records_of: Callable[[C, ScoredData, Any], Iterable[dict[str, Any]]]
) -> NoReturn:
    """The command: FILE and flags from the command line, records until there are enough, an exit code."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        raise SystemExit(f"usage: {prog} FILE [flags]; --help lists the flags")
    path = None if arguments[0].startswith("-") else Path(arguments.pop(0))
    config = load_config(config_cls, arguments, prog=f"{prog} FILE")
    configure_logging(prog)
    assert path is not None
    with one_line_errors(prog, OSError):
        count = generate(config, path, records_of)
    log.info("Wrote %d records to %s", count, path)
    raise SystemExit(0)


def generate(
    config: C, path: Path, records_of: Callable[[C, ScoredData, object], Iterable[Mapping[str, object]]]
) -> int:
    """Write exactly `num_seqs_to_save` records to `path`; how many. Raises GenerationError before anything is asked of
    the API.
    """
    if expect_regular(path).exists() and not config.append_to_previous:
        raise GenerationError(f"{path} exists; name another file, or pass --append-to-previous")
    tokenizer = load_tokenizer(config.tokenizer)
    written = 0
    for group in fetch_groups(config):
        for record in records_of(config, group, tokenizer):
            append_jsonl(path, record)
            written += 1
            if written == config.num_seqs_to_save:
                return written
        log.info("%d of %d records", written, config.num_seqs_to_save)
    return written


def fetch_groups(config: GenerationConfig) -> Iterator[ScoredData]:
    """Groups without end, as a trainer that trains on nothing gets them. Raises GenerationError."""
    with contextlib.closing(BatchingApi(config.api_url, config.token, Flags("--api-url", "--token"))) as api:
        if not config.take_over:
            wait_for(
                lambda: _expect_free(config, api),
                Wait("the end of the last collection", config.api_url, FINISHED_S + FOLLOWS_WITHIN_S, _in_use(config)),
            )
        _call(
            api,
            routes.REGISTER,
            Registration(
                wandb_group=COLLECTOR,
                wandb_project="",
                batch_size=config.group_size * config.tasks_per_step,
                max_token_len=config.max_token_len,
                checkpoint_dir="",
                save_checkpoint_interval=-1,
                starting_step=0,
                num_steps=0,
            ),
        )
        while True:
            yield from _next_batch(config, api)


def _expect_free(config: GenerationConfig, api: BatchingApi) -> None:
    """Return if nobody is registered, or a collector that has finished: it asks for batches no more. Raises NotYet for
    one that asked lately, and GenerationError for a trainer.
    """
    if _call(api, routes.INFO).batch_size <= 0:
        return
    if _call(api, routes.WANDB_INFO).group != COLLECTOR:
        raise _in_use(config)("a trainer has registered")
    asked_s = _call(api, routes.ACTIVITY).asked_s
    if asked_s is not None and asked_s < FINISHED_S:
        raise NotYet("a collector has asked for a batch lately")


def _in_use(config: GenerationConfig) -> Callable[[str], GenerationError]:
    return lambda reason: GenerationError(
        f"{reason} with {config.api_url}; start another API, or pass --take-over to end its run"
    )


def _next_batch(config: GenerationConfig, api: BatchingApi) -> list[ScoredData]:
    def attempt() -> list[ScoredData]:
        batch = _call(api, routes.BATCH).batch
        if not isinstance(batch, list) or not batch:
            raise NotYet("there is none yet")
        return batch

    def failed(reason: str) -> GenerationError:
        return GenerationError(
            f"no batch from {config.api_url} within {config.timeout:g} s; is an environment running?"
        )

    return wait_for(attempt, Wait("a batch", config.api_url, config.timeout, failed))


def _call(api: BatchingApi, route: Route[R], body: Registration | None = None) -> R:
    with reaching(
        api.url,
        GenerationError,
        remedy="start the API with `run-api`, or correct --api-url",
        also=(ApiRefused, ApiUnreachable),
    ):
        return api.call(route, body)


# --- records --------------------------------------------------------------------------------------------------------


def ranked(config: GenerationConfig, group: ScoredData) -> list[int]:
    """The first sequence of each of the group's rollouts, best first; none when the scores differ too little."""
    scores, rollouts = group.scores, rollouts_of(group)
    if not scores or max(scores) - min(scores) < config.minimum_score_diff_max_min:
        return []
    firsts = [place for place in range(len(scores)) if not place or rollouts[place] != rollouts[place - 1]]
    return sorted(firsts, key=lambda index: -scores[index])


def sequences_with(group: ScoredData, first: int) -> list[int]:
    """All sequences of the rollout whose first one this is."""
    rollouts = rollouts_of(group)
    return [place for place, rollout in enumerate(rollouts) if rollout == rollouts[first]]


def prompt_and_completion(group: ScoredData, index: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """A sample's text up to the first token that is trained on, and from there on."""
    tokens, mask = group.tokens[index], group.masks[index]
    first = next((place for place, value in enumerate(mask) if value != NOT_TRAINED), len(tokens))
    return tokenizer.decode(tokens[:first]), tokenizer.decode(tokens[first:])


def messages_of(group: ScoredData, index: int) -> list[Any]:
    """A sample's messages. Raises GenerationError when the environment sends none."""
    if not group.messages:
        raise GenerationError(
            "the environment sends no messages: start it with --env.include_messages true, or drop --save-messages"
        )
    return group.messages[index]
