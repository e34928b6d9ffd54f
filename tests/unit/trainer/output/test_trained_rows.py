"""trained.jsonl: what each step made of each group, found again by the group's id."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atroposlib.groups import group_id
from example_trainer.data.batching import make_batch
from example_trainer.exact.check import NotExact
from example_trainer.output.step_file import StepFile
from example_trainer.output.trained_rows import trained_rows
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, as_records, item
from tests.unit.trainer.whole_runs import feed, train

MODEL = {"tie_word_embeddings": True}


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / "trained.jsonl").read_text().splitlines()]


def expected_logprobs(model: str, tokens: list[int], mask: list[int]) -> list[float]:
    """Those of the model's own forward pass."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([tokens])).logits[0].float()
    found = logits.log_softmax(-1)
    return [found[place - 1, token].item() for place, token in enumerate(tokens) if mask[place] != -100]


def test_each_group_of_a_step_has_a_row_with_its_own_log_probabilities(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=2, lr=0.0)
    found = written(tmp_path)
    batches = [group for step in range(2) for group in feed(step)]
    assert [(row["step"], row["policy_version"]) for row in found] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert [row["group"] for row in found] == [group_id(group["tokens"]) for group in batches]
    assert [row["left_out"] for row in found] == [None, "all scores are 0"] * 2
    assert found[1]["logprobs"] == [None] * 4
    assert found[1]["advantages"] == [0.0] * 4
    assert found[0]["advantages"][0] == found[0]["advantages"][3] > 0 > found[0]["advantages"][1]
    for row, group in zip(found[::2], batches[::2], strict=True):
        for values, tokens, mask in zip(row["logprobs"], group["tokens"], group["masks"], strict=True):
            assert values == pytest.approx(expected_logprobs(model, tokens, mask), abs=2e-5)
            assert all(value == struct.unpack("f", struct.pack("f", value))[0] for value in values)  # a float32, whole


def test_it_can_be_switched_off_and_put_elsewhere(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, training_steps=1, save_trained=False)
    assert not (tmp_path / "logs/trained.jsonl").exists()
    train(model, tmp_path, training_steps=1, trained_path=tmp_path / "elsewhere/rows.jsonl")
    assert len((tmp_path / "elsewhere/rows.jsonl").read_text().splitlines()) == 2


def test_a_resumed_run_writes_each_step_once(model: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path, bridge=RecordingBridge(fail_at=4), checkpoint_interval=2)
    before = written(tmp_path)
    assert [row["step"] for row in before] == [1, 1, 2, 2, 3, 3]
    train(model, tmp_path, first_step=2, checkpoint_interval=2, resume="auto")
    assert [row["step"] for row in written(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert written(tmp_path)[:6] == before  # the third step again, to the last bit


def test_groups_that_cannot_be_trained_on_have_a_row_with_the_reason(model: str, tmp_path: Path) -> None:
    bad = item([1.0, 0.0], seed=1, inference_logprobs=None)
    unreadable = item([1.0, 0.0], seed=2) | {"tokens": "none"}
    good = item([1.0, 0.0], seed=3)
    batches: list[list[dict[str, Any]]] = [[bad], [unreadable, good]]
    train(model, tmp_path, api=FakeApi(lambda n: batches[n]), training_steps=1)
    first, second, third = written(tmp_path)  # the first batch had nothing to train on, and was passed over
    assert (first["group"], first["advantages"], first["logprobs"]) == (group_id(bad["tokens"]), None, [])
    assert first["left_out"].startswith("inference_logprobs: missing")
    assert (second["group"], bool(second["left_out"])) == (None, True)
    assert (third["group"], third["left_out"]) == (group_id(good["tokens"]), None)


def test_a_bad_batch_is_kept_with_the_reason(model: str, tmp_path: Path) -> None:
    with pytest.raises(NotExact):  # at its end: no batch agreed with the sampler
        train(model, tmp_path, training_steps=1, mismatch_limit=1e-9)
    first, second = written(tmp_path)
    assert "differ from the sampler's by" in first["left_out"]
    assert all(first["logprobs"])  # to be looked at
    assert second["left_out"] == "all scores are 0"


def test_the_batch_that_ends_a_run_is_kept_too(model: str, tmp_path: Path) -> None:
    with pytest.raises(NotExact):
        train(model, tmp_path, training_steps=1, mismatch_limit=1e-9, on_bad_batch="stop")
    assert [row["step"] for row in written(tmp_path)] == [1, 1]
    assert "--on-bad-batch stop" in written(tmp_path)[0]["left_out"]


@pytest.mark.parametrize(("old", "computed"), [("sampler", 2), ("recomputed", 4)])
def test_of_several_updates_what_is_known_before_the_first_is_kept(
    model: str, tmp_path: Path, old: str, computed: int
) -> None:
    settings: dict[str, Any] = {"updates_per_batch": 2, "training_steps": 1, "old_logprobs": old}
    train(model, tmp_path, **settings)
    (row,) = [row for row in written(tmp_path) if row["left_out"] is None]
    group = feed(0)[0]
    known = [place for place, values in enumerate(row["logprobs"]) if values is not None]
    assert len(known) == computed
    for place in known:
        expected = expected_logprobs(model, group["tokens"][place], group["masks"][place])
        assert row["logprobs"][place] == pytest.approx(expected, abs=2e-5)


def rows_of(groups: list[dict[str, Any]], seq_len: int = 64, **loss: Any) -> list[dict[str, Any]]:
    """Rows of a batch whose log-probabilities are 0, -1, -2, ... in each sequence."""
    settings = LossSettings(**loss)
    batch = make_batch(as_records(groups), seq_len=seq_len, policy_version=0, loss=settings)
    values = [-np.arange(sequence.trained_tokens, dtype=np.float32) for sequence in batch.sequences]
    found = trained_rows(batch.records, values, step=1, policy_version=1, left_out=None)
    return [row | {"logprobs": [None if one is None else list(one) for one in row["logprobs"]]} for row in found]


def test_a_marked_first_token_has_no_log_probability_and_a_cut_sequence_has_fewer() -> None:
    group = item([1.0, 0.0], prompt=2)
    group |= {"tokens": [[5, 6, 7], [5, 6, 7, 8]], "masks": [[5, 6, -100], [-100, 6, 7, 8]]}
    group["inference_logprobs"] = [[-1.0] * 3, [-1.0] * 4]
    (row,) = rows_of([group], seq_len=3)
    assert row["logprobs"] == [[None, 0.0], [0.0, -1.0]]


def test_advantages_of_single_tokens_and_masked_answers() -> None:
    given = item([1.0, 0.0], seed=1, longest=1, advantages=[[0.5], [0.0, 0.0, 0.0, 0.0, 0.25]])
    silent = item([1.0, 0.0], seed=2, advantages=[[0.0], [0.0]])
    cut = item([1.0, 0.0], seed=3, finish_reasons=["length", "stop"])
    all_cut = item([1.0, 0.0], seed=4, finish_reasons=["length", "length"])
    rows = rows_of([given, silent, cut, all_cut], mask_truncated=True)
    assert rows[0]["advantages"] == [0.5, [0.0, 0.0, 0.0, 0.0, 0.25]]
    assert rows[1]["left_out"] == "its advantages are all 0"
    assert (rows[2]["left_out"], rows[2]["logprobs"][0]) == (None, None)
    assert rows[2]["logprobs"][1]
    assert "its answers were cut (--mask-truncated)" in rows[3]["left_out"]


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_file_is_cut_at_a_step_and_its_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    for content, kept in (
        ('{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n{"st', [1, 2, 2]),
        ('{"step": 1}\n{"st', [1]),
        ('{"step": 1}', [1]),
        ("", []),
        ('{"step": 3}\n', []),
    ):
        path.write_text(content)
        file = StepFile(path, 3, "trained groups", "--trained-path")
        file.append(3, {"step": 3})
        file.close()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*kept, 3]


def test_a_fresh_run_moves_an_earlier_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    path.write_text("anything")
    StepFile(path, 1, "trained groups", "--trained-path").close()
    assert path.read_text() == ""
    assert [other.read_text() for other in tmp_path.glob("trained.*.jsonl")] == ["anything"]


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    file = StepFile(path, 1, "trained groups", "--trained-path")
    file.append(1, {"step": 1, "logprobs": [np.array([math.nan, -0.5])]})
    assert json.loads(path.read_text())["logprobs"] == [[None, -0.5]]
