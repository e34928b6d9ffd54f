"""--overlap: gradients of groups that wait for their batch, with the real batching API."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer import grpo
from example_trainer.data.batching import Batch, make_batch
from example_trainer.data.batching import Sequence as Sampled
from example_trainer.loop import run as loop
from example_trainer.loop.learner import Learner
from example_trainer.loop.overlap import EarlyGradients
from example_trainer.loss.metric import Metrics
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from tests.client import http
from tests.unit.trainer.fakes import RecordingBridge, as_records, item
from tests.unit.trainer.whole_runs import config, real_api, weights

MODEL = {"initializer_range": 0.1}
GROUPS = 3
STEPS = 2
COMPARED = ("loss", "pg_loss", "entropy", "grad_norm", "ratio_mean", "ratio_max", "logprob_diff_mean", "sampler_kl")
DEADLINE_S = 30.0

Between = Callable[[str, int], None]  # what the environment does after each group


def group(step: int, place: int, **fields: Any) -> dict[str, Any]:
    scores = [1.0, 0.0, 0.5, 0.0] if place else [1.0, 1.0, 1.0, 1.0]  # the first has no signal
    made = item(scores, seed=10 * step + place, policy_versions=[[step, step]] * 4, **fields)
    return {key: value for key, value in made.items() if value is not None}


class Groups(threading.Thread):
    """An environment of groups that are known beforehand; it posts one whenever the trainer may have used the last."""

    def __init__(self, url: str, between: Between) -> None:
        super().__init__(daemon=True)
        self.url, self.between = url, between

    def get(self, path: str) -> dict[str, Any]:
        reply: dict[str, Any] = http.get(self.url + path, timeout=10).json()
        return reply

    def run(self) -> None:
        for step in range(STEPS):
            while self.get("/status").get("trained_steps") != step:
                time.sleep(0.01)
            for place in range(GROUPS):
                http.post(f"{self.url}/scored_data", json=group(step, place), timeout=10).raise_for_status()
                self.between(self.url, place)


def train(folder: Path, model: str, between: Between = lambda url, place: None, **changes: Any) -> list[dict[str, Any]]:
    """A run of STEPS steps; the rows of its metrics."""
    with real_api() as url:
        environment = Groups(url, between)
        environment.start()
        settings = dict(training_steps=STEPS, batch_size=4 * GROUPS, lr=1e-3, warmup_steps=0, log_dir=folder)
        settings |= dict(fetch_timeout=DEADLINE_S, eval_deadline=0)
        grpo.run(config(model, folder, url, **settings | changes), RecordingBridge())
        environment.join(DEADLINE_S)
        assert not environment.is_alive()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def divisors(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of every gradient that is computed."""
    found: list[float] = []
    gradients = Learner.gradients

    def watched(learner: Learner, sequences: list[Any], loss_divisor: float) -> Metrics:
        measured = gradients(learner, sequences, loss_divisor)
        found.append(loss_divisor)
        return measured

    monkeypatch.setattr(Learner, "gradients", watched)
    return found


def test_what_is_computed_early_makes_the_same_update_and_the_same_rows(
    model: str, tmp_path: Path, divisors: list[float]
) -> None:
    whole = train(tmp_path / "whole", model)
    assert len(divisors) == STEPS
    assert 1.0 not in divisors
    divisors.clear()

    def until_computed(url: str, place: int) -> None:
        """The trainer has computed on the group that was posted last."""
        before, end = len(divisors), time.monotonic() + 5
        while 0 < place < GROUPS - 1 and len(divisors) == before and time.monotonic() < end:
            time.sleep(0.01)

    early = train(tmp_path / "early", model, until_computed, overlap=True, micro_batch_tokens=4096)
    assert divisors == [1.0] * 2 * STEPS  # a quarter of the batch is enough: one before each batch is whole, one after
    for one, other in zip(whole, early, strict=True):
        assert {key: other[key] for key in COMPARED} == pytest.approx({key: one[key] for key in COMPARED}, rel=1e-4)
        assert other["early_s"] > 0
        assert one["early_s"] == 0
        for key in ("trained_tokens", "groups", "zero_variance_groups", "bit_exact/tokens", "reward_mean"):
            assert one[key] == other[key]
    ours, theirs = (weights(tmp_path / name / "checkpoints" / "final_model") for name in ("early", "whole"))
    start = weights(Path(model))
    for name in ours:
        assert not torch.equal(theirs[name], start[name])
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=3e-5)  # Adam's first steps are of size lr
    assert logprobs(tmp_path / "early") == [pytest.approx(row, abs=1e-3) for row in logprobs(tmp_path / "whole")]


def logprobs(folder: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    return [values for row in sorted(rows, key=lambda row: str(row["group"])) for values in row["logprobs"] if values]


OTHERS: dict[str, Callable[[dict[int, list[Sampled]]], dict[int, list[Sampled]]]] = {
    # the queue changed: a returned batch, a minimum, a group that went stale
    "another id": lambda groups: {identity + 1000: sequences for identity, sequences in groups.items()},
    # an API without a journal has started again
    "other tokens": lambda groups: {
        identity: [replace(sequence, tokens=sequence.tokens[::-1].copy()) for sequence in sequences]
        for identity, sequences in groups.items()
    },
    "fewer sequences": lambda groups: {identity: sequences[1:] for identity, sequences in groups.items()},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_batch_without_a_group_that_was_computed_early_is_computed_again(
    model: str, tmp_path: Path, divisors: list[float], other: str
) -> None:
    foreign: list[float] = []

    class Mistaken(EarlyGradients):
        def add(self, groups: Any) -> None:
            super().add(OTHERS[other](groups))
            foreign.append(len(self.parts))

    def until_computed(url: str, place: int) -> None:
        end = time.monotonic() + 2
        while place == 1 and not (foreign and foreign[-1]) and time.monotonic() < end:
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "EarlyGradients", Mistaken)
        train(tmp_path / "early", model, until_computed, overlap=True, micro_batch_tokens=8)
    assert any(foreign)
    train(tmp_path / "whole", model)
    ours, theirs = (weights(tmp_path / name / "checkpoints" / "final_model") for name in ("early", "whole"))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=3e-5)


@pytest.mark.parametrize("why", ["rejected", "gone"])
def test_a_group_without_a_gradient_may_be_missing_in_the_batch(model: str, why: str) -> None:
    """Nothing of it was computed: it has no signal, or cannot be trained on."""
    config = TrainerConfig.model_validate({"model_name": model})
    learner = Learner(config, torch.device("cpu"), ALONE)
    learner.load(model)
    learner.begin("")
    untrainable, good = group(0, 1, masks=[[5]] * 4), group(0, 2)
    items = {7: untrainable if why == "rejected" else group(0, 0), 8: good}

    def converted(*items: dict[str, Any]) -> Batch:
        return make_batch(as_records(items), seq_len=99, policy_version=0)

    early = EarlyGradients(learner, 1, 1)
    early.add({identity: converted(each).sequences for identity, each in items.items()})
    (part,) = early.parts
    batch, ids = (converted(untrainable, good), [7, 8]) if why == "rejected" else (converted(good), [8])
    assert len(batch.rejected) == (why == "rejected")
    computed = early.of(batch, ids).sequences
    assert early.left(computed) == []
    assert early.left([replace(sequence, weight=0.5) for sequence in computed]) == []  # a copy is the same sequence
    assert early.parts == [part]


def test_an_api_that_cannot_tell_what_waits_gives_whole_batches(
    model: str, tmp_path: Path, divisors: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from atroposlib.wire import routes

    monkeypatch.setattr(routes, "ARRIVALS", routes.Route("POST", "/batch/unknown", "trainer", routes.ARRIVALS.reply))
    train(tmp_path, model, overlap=True)
    assert len(divisors) == STEPS


@pytest.mark.parametrize("several", [{"updates_per_batch": 2}, {"epochs": 2}, {"old_logprobs": "recomputed"}])
def test_several_updates_wait_for_the_whole_batch(model: str, tmp_path: Path, several: dict[str, Any]) -> None:
    config = TrainerConfig.model_validate({"model_name": model, "overlap": True, **several})
    assert not config.overlaps
    assert TrainerConfig.model_validate({"model_name": model, "overlap": True}).overlaps
    rows = train(tmp_path, model, overlap=True, **several)
    assert [row["early_s"] for row in rows] == [0] * STEPS


def arrivals(url: str, trainer: int, known: Sequence[int] = ()) -> dict[str, Any]:
    body = {"trainer": trainer, "known": list(known)}
    reply: dict[str, Any] = http.post(f"{url}/batch/arrivals", json=body, timeout=10).json()
    return reply


def test_arrivals_are_told_and_not_delivered() -> None:
    registration = {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 8,
        "max_token_len": 64,
        "checkpoint_dir": "c",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 2,
    }
    with real_api() as url:

        def post(path: str, **body: Any) -> dict[str, Any]:
            reply: dict[str, Any] = http.post(url + path, json=body, timeout=10).json()
            return reply

        assert arrivals(url, 0)["whole"]  # the lease tells that there is no trainer
        trainer = post("/register", **registration)["uuid"]
        assert arrivals(url, trainer) == {"batch": [], "ids": [], "whole": False}
        post("/scored_data", **group(0, 1))
        first = arrivals(url, trainer)
        assert (len(first["batch"]), first["whole"]) == (1, False)
        assert first["batch"][0]["tokens"] == group(0, 1)["tokens"]
        assert arrivals(url, trainer) == first
        assert arrivals(url, trainer, first["ids"])["batch"] == []
        assert http.get(f"{url}/status", timeout=10).json()["queue_size"] == 1
        post("/scored_data", **group(0, 2))
        assert arrivals(url, trainer, first["ids"]) == {"batch": [], "ids": [], "whole": True}
        leased = post("/batch/lease", trainer=trainer, ids=True)
        assert leased["ids"][:1] == first["ids"]
        assert arrivals(url, trainer)["whole"]  # the reply to the lease was lost: it is there to be given again
        assert not post("/batch/arrivals", trainer=trainer, holding=[leased["lease"]])["whole"]
        for later in (item([0.0, 1.0], seed=9, inference_logprobs=None), group(1, 1)):
            assert post("/scored_data", **later)["status"] == "received"
        mixed = post("/batch/arrivals", trainer=trainer, holding=[leased["lease"]])
        assert mixed == {"batch": [], "ids": [], "whole": False}  # of two sizes: nothing can be foreseen
        replaced = post("/register", **registration)["uuid"]
        assert replaced != trainer
        refused = http.post(f"{url}/batch/arrivals", json={"trainer": trainer}, timeout=10)
        assert refused.status_code == 409
