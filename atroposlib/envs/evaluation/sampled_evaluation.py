"""`evaluate --samples N`: several samples per question, from any server that speaks OpenAI's API. It needs neither
token ids nor a tokenizer.

    held-out questions x samples ──▶ rollouts, at most `concurrency` at once ──▶ score ──▶ one line of FILE.jsonl each
                                                                                          │
          a table: mean score, avg@N, pass@k, tokens, cost, seconds; FILE.html ◀──────────┘

The environment is the one that trains. A sample that fails is a line with its error and has no score; the same command
samples only what is missing or failed. The first line of the file has what was asked, and a file of other questions or
settings is refused.
"""

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from atroposlib.envs.errors import DataError, EnvError, RecordError
from atroposlib.envs.evaluation.evaluation_metrics import SAMPLES, TABLE, Prices, Sample, sampled_table, summary
from atroposlib.envs.failures import Failure, attempt
from atroposlib.envs.files.html_report import page_beside, write_html
from atroposlib.envs.files.records import (
    WRITE_ELSEWHERE,
    append_jsonl,
    tell_result,
    the_only_evaluation,
    write_eval_results,
    write_result,
)
from atroposlib.envs.payloads import Item
from atroposlib.envs.rollouts import Rollout, Scored
from atroposlib.envs.sampling.sampling_fields import SamplingFields
from atroposlib.envs.server_handling.dispatching.dispatch import Split, gather_or_cancel
from atroposlib.errors import reading
from atroposlib.logs import get_logger, put
from atroposlib.row_files.record_file import as_lines

log = get_logger(__name__)

REPORT_EVERY_S = 10.0
OTHER_FILE = "choose another --output"

_spent: ContextVar[Counter[str]] = ContextVar("spent")  # tokens of the sample that runs


class Questions(Protocol):
    """Describes what is evaluated: a `QuestionEnv`."""

    name: ClassVar[str | None]
    server: Any
    config: Any
    right_from: float
    _env_run: Any

    @property
    def asked_always(self) -> Sequence[Item]: ...

    def _identity(self, item: Item) -> object: ...

    async def rollouts(self, item: Item, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]: ...

    async def _score(self, item: Item, rollout: Rollout) -> Scored: ...


@dataclass
class Progress:
    """Tells the log every few seconds how far the evaluation is."""

    total: int
    done: int = 0
    failed: int = 0
    _told: float = field(default_factory=time.monotonic)

    def count(self, failed: bool) -> None:
        """One more sample."""
        self.done += 1
        self.failed += failed
        if time.monotonic() - self._told >= REPORT_EVERY_S:
            self._told = time.monotonic()
            log.info("Sampled %d of %d (%d failed)", self.done, self.total, self.failed)


async def evaluate_samples(env: Questions, asked: SamplingFields) -> dict[str, float]:
    """Sample what the file lacks, print the table and the page's path, and return the metrics. Raises EnvError."""
    path = _file(env, asked)
    with the_only_evaluation(path, OTHER_FILE):
        return await _completed(env, asked, path)


async def _completed(env: Questions, asked: SamplingFields, path: Path) -> dict[str, float]:
    header = header_of(env, asked)
    kept = _begun(path, header)
    wanted = [(index, number) for number in range(asked.samples) for index in range(len(env.asked_always))]
    missing = [each for each in wanted if each not in kept]
    log.info("%d samples of %d questions, %d already in %s", len(wanted), len(env.asked_always), len(kept), path)
    progress, slots = Progress(len(missing)), asyncio.Semaphore(asked.concurrency)

    async def one(index: int, number: int) -> Sample:
        async with slots:
            sample, line = await _sampled(env, asked, index, number)
        append_jsonl(path, line)
        progress.count(sample.error is not None)
        return sample

    env.server.managed_server = counted(env.server.managed_server)
    started = time.time()
    fresh = await gather_or_cancel([one(*each) for each in missing])
    ended = time.time()
    samples = [*kept.values(), *fresh]
    metrics = summary(samples, asked.samples, env.right_from, Prices(asked.price_in, asked.price_out))
    metrics["seconds"] = ended - started
    _report(env, asked, path, metrics, (started, ended))
    if not any(sample.error is None for sample in samples):
        raise EnvError(f"every sample failed, the last with: {samples[-1].error if samples else 'no question'}")
    return metrics


def _begun(path: Path, header: Mapping[str, object]) -> dict[tuple[int, int], Sample]:
    """The samples of a file, which is made if it is not there. Raises DataError."""
    kept = read_samples(path, header)
    if not path.exists():
        append_jsonl(path, header)
    return kept


def _file(env: Questions, asked: SamplingFields) -> Path:
    """Return the file of the samples."""
    if asked.output is not None:
        return asked.output
    if env.config.data_dir_to_save_evals is not None:
        return Path(env.config.data_dir_to_save_evals) / SAMPLES
    return Path("evaluations") / f"{plain(env.name or 'environment')}-{plain(env.server.model_name)}.jsonl"


def _report(
    env: Questions, asked: SamplingFields, path: Path, metrics: dict[str, float], times: tuple[float, float]
) -> None:
    """Print the table, write the page beside the file of samples, and metrics.json where evaluations are saved."""
    name = env.name or "environment"
    shown = sampled_table(f"{name}, {env.server.model_name}", metrics)
    try:
        tell_result(shown)
    finally:  # what was asked is not lost with a reader of the output
        page = page_beside(path)
        with reading(f"cannot write {page}", RecordError, remedy=WRITE_ELSEWHERE):
            write_html(path, page, shown)
        put(f"Every sample: {page}")
        log.info("Every sample is a line of %s", path)
        if env.config.data_dir_to_save_evals is not None:
            write_eval_results(
                Path(env.config.data_dir_to_save_evals),
                f"{name}_eval",
                metrics,
                None,
                model_name=env.server.model_name,
                start_time=times[0],
                end_time=times[1],
                generation_parameters=_settings(env, asked),
            )
            write_result(Path(env.config.data_dir_to_save_evals) / TABLE, shown.encode())


async def _sampled(env: Questions, asked: SamplingFields, index: int, number: int) -> tuple[Sample, dict[str, Any]]:
    """A sample, and its line."""
    item, spent, started = env.asked_always[index], Counter[str](), time.monotonic()
    _spent.set(spent)
    rollout: Rollout | None = None
    outcome: list[Rollout] | Scored | Failure = await attempt(
        env.rollouts(item, 1, "eval", asked.temperature, asked.top_p), env.config.rollout_limit_s
    )
    if isinstance(outcome, list):
        rollout = outcome[0]
        outcome = await attempt(env._score(item, rollout), env.config.rollout_limit_s, late="scorer", other="scorer")
    error = f"{outcome.cause}: {outcome}" if isinstance(outcome, Failure) else None
    if error is not None:
        log.warning("Question %d, sample %d failed: %s", index, number, error)
    scored = outcome if isinstance(outcome, Scored) else Scored(None)
    tokens = (spent["prompt"], spent["completion"])
    if error is None and scored.reward is None:
        error = "not scored"
    line = {
        "question": index,
        "sample": number,
        "score": scored.reward,
        "outcome": scored.outcome or None,
        "rewards": dict(scored.rewards) or None,
        "error": error,
        "messages": rollout.messages if rollout else None,
        "reference": env._env_run.samples.reference(item),
        "prompt_tokens": tokens[0],
        "completion_tokens": tokens[1],
        "seconds": round(time.monotonic() - started, 3),
    }
    return Sample(index, number, scored.reward, tokens, error), line


class Counted:
    """A managed server whose replies are counted for the sample that asks."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed

    async def chat_completion(self, **arguments: Any) -> Any:
        """The reply."""
        return self._count(await self._managed.chat_completion(**arguments))

    async def completion(self, **arguments: Any) -> Any:
        """The reply."""
        return self._count(await self._managed.completion(**arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._managed, name)

    def _count(self, reply: Any) -> Any:
        if reply.usage is not None:
            _spent.get().update(prompt=reply.usage.prompt_tokens, completion=reply.usage.completion_tokens)
        return reply


def counted(
    managed_server: Callable[..., AbstractAsyncContextManager[object]],
) -> Callable[..., AbstractAsyncContextManager[object]]:
    """`ServerManager.managed_server`, with what it gives `Counted`."""

    @asynccontextmanager
    async def with_count(*args: object, **named: object) -> AsyncIterator[Counted]:
        async with managed_server(*args, **named) as managed:
            yield Counted(managed)

    return with_count


# --- the file ---------------------------------------------------------------------------------------------------------


def header_of(env: Questions, asked: SamplingFields) -> dict[str, Any]:
    """Return the settings that must be the same for samples to belong together."""
    asked_of = [env._env_run.samples.ask("prompt", partial(env._identity, item)) for item in env.asked_always]
    prompts = json.dumps(asked_of, sort_keys=True, default=str)
    return {
        "evaluation": {
            "environment": env.name,
            "model": env.server.model_name,
            "questions": len(env.asked_always),
            "prompts": hashlib.sha256(prompts.encode("utf-8", "replace")).hexdigest()[:16],
            **_weights(env.server.model_name),
            **_settings(env, asked),
        }
    }


def _weights(model: str) -> dict[str, float]:
    """When a model that is a directory was last written: it may have been trained on."""
    files = Path(model).glob("*.safetensors") if Path(model).is_dir() else ()
    written = [file.stat().st_mtime for file in files]
    return {"weights_written": max(written)} if written else {}


def _settings(env: Questions, asked: SamplingFields) -> dict[str, object]:
    return {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_new_tokens": env.config.max_new_tokens,
    }


def read_samples(path: Path, header: Mapping[str, object]) -> dict[tuple[int, int], Sample]:
    """The scored samples of a file, by question and number; none if it is not there. Raises DataError."""
    samples = {}
    for row in sample_rows(path, header):
        with reading(f"{path} has a line that is not a sample", DataError):
            if row["score"] is not None:
                tokens = (int(row["prompt_tokens"]), int(row["completion_tokens"]))
                samples[row["question"], row["sample"]] = Sample(row["question"], row["sample"], row["score"], tokens)
    return samples


def sample_rows(path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a file of samples; none if it is not there. A last line that was cut is removed, in place, and the
    file if that is its first. Raises DataError for another file, or for one with another header.
    """
    if not path.exists():
        return []
    with reading(f"cannot read {path}", DataError):
        text = path.read_bytes()
    lines = text.split(b"\n")[:-1]
    if not lines and as_lines(header).startswith(text):  # the process was killed before it had written the header
        with reading(f"cannot remove {path}, which has no whole line", DataError):
            path.unlink()
        return []
    if not is_of_samples(path):
        raise DataError(f"{path} is not a file of samples; choose another --output")
    first = json.loads(lines[0])["evaluation"]
    if differing := [key for key, value in header["evaluation"].items() if first.get(key) != value]:
        key = differing[0]
        raise DataError(
            f"{path} has samples with another {key} ({first.get(key)}, now {header['evaluation'][key]}); choose another"
            " --output"
        )
    if not text.endswith(b"\n"):  # the process was killed while it wrote
        with reading(f"cannot write {path}", DataError):
            os.truncate(path, text.rfind(b"\n") + 1)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        with reading(f"{path}:{number} is not a sample", DataError):
            row = json.loads(line)
            rows.append({**row, "score": row["score"]})
    return rows


def is_of_samples(path: Path) -> bool:
    """Return whether a file has the first line of an evaluation."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        line = file.readline()
    return line.startswith(b'{"evaluation":') and line.endswith(b"\n")


def plain(name: str) -> str:
    """A part of a file name."""
    return (
        "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip(".-")[:100] or "model"
    )
