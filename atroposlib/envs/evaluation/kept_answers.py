"""`evaluate` without `--samples` keeps each greedy answer in a file once it is scored: the same command asks only what
is missing or failed.

    held-out question ──▶ in the file with a score? ──yes──▶ its answer as it was
                                   └──no──▶ asked and scored ──▶ one line of FILE.jsonl

The first line has what was asked, as that of `sampled_evaluation.py`, and the environment's code: another `score` is
another evaluation.
"""

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from atroposlib.envs.errors import DataError
from atroposlib.envs.evaluation.evaluation import Answered
from atroposlib.envs.evaluation.evaluation_metrics import ANSWERS, SAMPLES
from atroposlib.envs.evaluation.sampled_evaluation import (
    OTHER_FILE,
    Questions,
    header_of,
    is_of_samples,
    plain,
    sample_rows,
)
from atroposlib.envs.files.records import append_jsonl, the_only_evaluation
from atroposlib.envs.payloads import Item
from atroposlib.envs.rollouts import Rollout, Scored
from atroposlib.envs.sampling.sampling_fields import SamplingFields
from atroposlib.logs import get_logger
from atroposlib.row_files.json_text import encode

log = get_logger(__name__)

GREEDY = SamplingFields(samples=1, temperature=0.0)


class KeptAnswers:
    """The scored answers of a file, and the file. Raises DataError for a file of something else."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        self._path = path
        self._rows = {row["question"]: row for row in sample_rows(path, header) if row["score"] is not None}
        if not path.exists():
            append_jsonl(path, header)

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, index: int, item: Item) -> Answered | None:
        """The answer to question `index`, if it is there."""
        if (row := self._rows.get(index)) is None:
            return None
        scored = Scored(row["score"], row["outcome"] or "", row["rewards"] or {})
        return Answered(item, Rollout(row["text"], row["messages"], []), scored, kept=row)

    def add(self, row: Mapping[str, object], text: str, record: Mapping[str, object]) -> None:
        """Keep an answer: the row that readers see, its text, and what the author keeps of it. Raises RecordError."""
        named = {"question": row["index"], "sample": 0, "rewards": None, "error": None, "text": text}
        content = {**named, **{key: value for key, value in row.items() if key != "index"}, "record": record}
        append_jsonl(self._path, msgspec.json.decode(encode(content, default=str)))


@contextmanager
def keep_answers(env: Questions, output: Path | None) -> Iterator[KeptAnswers | None]:
    """The file in which an evaluation is kept, and which nobody else writes meanwhile: `output`, or for servers of
    OpenAI's API, which may be paid, one by the directory of evaluations, the environment and the model. None for our
    own servers without `output`: they may serve other weights under one name. Raises DataError, EnvError.
    """
    folder = env.config.data_dir_to_save_evals
    if folder is not None and is_of_samples(Path(folder) / SAMPLES):
        raise DataError(
            f"{folder} has samples of `evaluate --samples`, which this evaluation would replace: choose another"
            " directory, or give --samples"
        )
    if output is None and any(server.config.server_type != "openai" for server in env.server.servers):
        yield None
        return
    by_default = Path("evaluations") / f"{plain(env.name or 'environment')}-{plain(env.server.model_name)}-greedy.jsonl"
    path = output or (Path(folder) / ANSWERS if folder is not None else by_default)
    header = header_of(env, GREEDY)
    header["evaluation"]["code"] = code_of(type(env))
    with the_only_evaluation(path, OTHER_FILE):
        kept = KeptAnswers(path, header)
        log.info(
            "%d of %d answers are in %s already; only the others are asked for", len(kept), len(env.asked_always), path
        )
        yield kept


def code_of(env_cls: type) -> str:
    """A digest of the file that defines an environment; empty where there is none."""
    source = inspect.getsourcefile(env_cls)
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16] if source and Path(source).is_file() else ""
