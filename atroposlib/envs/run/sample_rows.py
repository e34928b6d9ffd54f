"""Rows of samples.jsonl, one per group that was sampled: those that were sent, and under `serve` those that were
dropped, with the reason.

    item ──begin──▶ Sampling ──group──▶ Sampled ──write──▶ row (docs/run_directory.md names its fields)
                       └── no group ──write_lost──▶ row without sequences

A group may be held back for a batch and written while another item is sampled, so `Sampled` carries the facts about its
own item.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from atroposlib.envs.authors.author_errors import origin
from atroposlib.envs.failures import Failure
from atroposlib.envs.files.records import JsonlWriter
from atroposlib.envs.payloads import Item, Rejection, ScoredDataGroup, completion_lengths
from atroposlib.groups import group_id
from atroposlib.logs import get_logger
from atroposlib.row_files.json_text import encode
from atroposlib.type_definitions import Messages
from atroposlib.wire.typed import all_encodable, encodable

log = get_logger(__name__)

T = TypeVar("T")
ERROR_CHARS = 1000  # of one failed rollout


@dataclass(slots=True)
class Sampling:
    """One item while it is sampled: since when (Unix seconds), and its rollouts that failed so far."""

    started: float
    failures: list[Failure] = field(default_factory=list)
    gave_groups: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """A group, and what is known of how it was sampled; `rejected` where it was held back for want of a signal."""

    group: ScoredDataGroup
    item: Item
    started: float | None  # None: an author sent it outside of any item
    ended: float
    failures: tuple[Failure, ...] = ()
    rejected: Rejection | None = None


_sampling: ContextVar[Sampling | None] = ContextVar("sampling", default=None)


class Author(Protocol):
    """Lists what the rows need of an environment."""

    jsonl_writer: JsonlWriter | None
    curr_step: int
    tokenizer: Any

    def _reference_of(self, item: Item) -> str | None: ...

    def _prompt_of(self, item: Item) -> Messages | None: ...


class Run(Protocol):
    """Lists what the rows need of an environment's run."""

    policy_version: int

    @property
    def env(self) -> Author: ...

    @property
    def link(self) -> object | None: ...

    @property
    def display_name(self) -> str: ...


class SampleRows:
    """Writes the rows of `run`, if the configuration names a file."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.failed: dict[str, str] = {}  # the author's methods that raised, and the first place

    @contextlib.contextmanager
    def item(self) -> Iterator[None]:
        """Wrap everything that is done for one item."""
        token = _sampling.set(Sampling(time.time()))
        try:
            yield
        finally:
            _sampling.reset(token)

    def note_failures(self, failures: list[Failure]) -> None:
        """Rollouts of the current item have failed."""
        if (sampling := _sampling.get()) is not None:
            sampling.failures += failures

    def sampled(self, group: ScoredDataGroup, item: Item, rejected: Rejection | None = None) -> Sampled:
        """A group of the current item, which is complete now."""
        sampling, now = _sampling.get(), time.time()
        if sampling is None:
            return Sampled(group, item, None, now, (), rejected)
        sampling.gave_groups = True
        known = len(sampling.failures) == sum((group.get("failed") or {}).values())  # an item may give several groups
        return Sampled(group, item, sampling.started, now, tuple(sampling.failures) if known else (), rejected)

    def write(self, sampled: Sampled, dropped: str | None = None) -> None:
        """Append the row of a group. One that was dropped is written under `serve` alone: what `process` writes is
        data to train on.
        """
        if self._run.env.jsonl_writer is None or (dropped is not None and self._run.link is None):
            return
        row = self._head(sampled.started, sampled.ended, sampled.item, sampled.failures, dropped)
        # a trainer that states no needs is given whatever an author sends
        with contextlib.suppress(OverflowError, TypeError, ValueError):
            row["group"] = group_id(sampled.group["tokens"])
        row["completion_tokens"] = completion_lengths(sampled.group)
        self._append(row, sampled.group, self._texts(sampled.group))

    def write_malformed(self, group: ScoredDataGroup, item: Item, dropped: str) -> None:
        """Append the row of a group that no trainer can use: nothing is known of what its lists hold."""
        if self._run.env.jsonl_writer is None or self._run.link is None:
            return
        sampled = self.sampled(group, item)
        row = self._head(sampled.started, sampled.ended, item, sampled.failures, dropped)
        self._append(row, group, {})

    def write_lost(self, item: Item, dropped: str) -> None:
        """Append a row for the current item, unless it gave groups, which have rows of their own."""
        sampling = _sampling.get()
        if self._run.env.jsonl_writer is None or self._run.link is None or sampling is None or sampling.gave_groups:
            return
        row = self._head(sampling.started, time.time(), item, tuple(sampling.failures), dropped)
        row |= {"prompt": self.prompt(item)}
        row |= {"failed": dict(Counter(failure.cause for failure in sampling.failures)) or None}
        self._append(row, {}, {})

    def reference(self, item: Item) -> str | None:
        """The reference answer of an item, if its environment has one."""
        reference = self.ask("reference_answer", lambda: self._run.env._reference_of(item))
        return None if reference is None else str(reference)

    def prompt(self, item: Item) -> Messages | None:
        """The messages of an item, if its environment tells them."""
        return self.ask("prompt", lambda: self._run.env._prompt_of(item))

    def ask(self, name: str, hook: Callable[[], T]) -> T | None:
        """Ask an author's method, for the record alone: nothing is lost to an error in it."""
        try:
            return hook()
        except Exception as error:  # the author's code may raise anything
            if name not in self.failed:
                self.failed[name] = origin(error)
                log.warning("%s failed; the rows go without what it gives", name, exc_info=True)
            return None

    def _head(
        self, started: float | None, ended: float, item: Item, failures: tuple[Failure, ...], dropped: str | None
    ) -> dict[str, object]:
        """The fields that every row has, which come before those of the group."""
        return {
            "step": self._run.env.curr_step,
            "policy_version": self._run.policy_version,
            "env": self._run.display_name,
            "group": None,
            "started": started,
            "time": ended,
            "dropped": None if dropped is None else encodable(" ".join(dropped.split())),
            "reference": self.reference(item),
            "failures": [
                {"cause": failure.cause, "error": encodable(str(failure)[:ERROR_CHARS]), "messages": failure.messages}
                for failure in failures
            ],
            "completion_tokens": [],
            "tokens": [],
            "masks": [],
            "scores": None,
        }

    def _append(self, row: dict[str, Any], group: Any, texts: Mapping[str, object]) -> None:
        """Our fields first, so that a reader finds them without reading the lists behind them. One that is not JSON
        costs the row that field, and no group its place in a batch.
        """
        assert self._run.env.jsonl_writer is not None
        lists = {name: value for name, value in group.items() if name in EMPTY or name not in (*row, *UNWRITTEN)}
        if "messages" in lists:
            lists["messages"] = all_encodable(lists["messages"])
        step = None if self._run.link is None else int(row["step"])  # what `process` writes is data: all of it is kept
        whole = {**row, **dict.fromkeys(ALWAYS - row.keys()), **lists, **texts}
        try:
            self._run.env.jsonl_writer.write(whole, step)
        except TypeError as error:
            unwritable = [str(name) for name, value in whole.items() if not _is_json({name: value})]
            log.warning("A row goes without %s, of which no JSON can be made: %s", ", ".join(unwritable), error)
            known = {name: value for name, value in whole.items() if name not in unwritable}
            left = {**dict.fromkeys(ALWAYS | row.keys()), "tokens": [], "masks": [], "scores": None, **known}
            self._run.env.jsonl_writer.write({**left, "unwritable": str(error)}, step)

    def _texts(self, group: ScoredDataGroup) -> dict[str, object]:
        """Return the text of the tokens where there are no messages."""
        if group.get("messages"):
            return {}
        return {"texts": [self._run.env.tokenizer.decode(tokens) for tokens in group["tokens"]]}


def _is_json(value: object) -> bool:
    try:
        encode(value)
    except TypeError:
        return False
    return True


UNWRITTEN = ("routed_experts",)  # nobody reads them, and they are several times as large as all the rest
EMPTY = ("tokens", "masks", "scores")  # of a row without a group, else the group's own
# Keys that every row has, null where the group lacks them: readers of 0.4.0's files index them.
ALWAYS = {
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "group_overrides",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
}
