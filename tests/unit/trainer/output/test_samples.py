"""Sampled answers as tables that people look at."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from atroposlib.wire.batching import NOT_TRAINED, ScoredData
from example_trainer.output.metrics import TensorBoardSink, WandbSink
from example_trainer.output.samples import NEXT_SEQUENCE, Sample, samples_of
from example_trainer.settings.config import TrainerConfig


class Words:
    """A tokenizer whose token n is the word `wn`."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)


def test_an_answer_begins_at_the_first_sampled_token_and_keeps_later_turns() -> None:
    tokenizer: Any = Words()
    masks = [[NOT_TRAINED, NOT_TRAINED, 3, NOT_TRAINED, 5], [NOT_TRAINED, NOT_TRAINED, 6, 7, 8]]
    group = ScoredData([[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]], masks, [1.0, 0.5])
    assert samples_of(group, tokenizer) == [Sample("w1 w2", "w3 w4 w5", 1.0), Sample("w1 w2", "w6 w7 w8", 0.5)]


def test_a_rollout_of_several_sequences_is_one_sample() -> None:
    tokenizer: Any = Words()
    tokens, masks = [[1, 2], [1, 3], [1, 4]], [[NOT_TRAINED, 2], [NOT_TRAINED, 3], [NOT_TRAINED, 4]]
    group = ScoredData(tokens, masks, [1.0, 1.0, 0.0], rollouts=[0, 0, 1])
    assert samples_of(group, tokenizer) == [
        Sample("w1", f"w2{NEXT_SEQUENCE}w1 w3", 1.0),
        Sample("w1", "w4", 0.0),
    ]


def test_nothing_sampled_is_an_empty_answer() -> None:
    tokenizer: Any = Words()
    assert samples_of(ScoredData([[1]], [[NOT_TRAINED]], [0.0]), tokenizer) == [Sample("w1", "", 0.0)]


def test_tensorboard_shows_markup_of_an_answer_as_text(tmp_path: Path) -> None:
    with ExitStack() as resources:
        samples = [Sample("1 + 1?", "<script>a</script> | b\nc", 0.5)]
        TensorBoardSink(tmp_path, resources).write_samples(10, samples)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("train/samples/text_summary")
    table = make_ndarray(event.tensor_proto)[0].decode()
    assert event.step == 10
    assert table.splitlines()[2] == "| 1 + 1? | &lt;script&gt;a&lt;/script&gt; &#124; b<br>c | 0.5 |"


def test_wandb_gets_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    run = SimpleNamespace(log=lambda entry, step: logged.append((entry, step)), finish=lambda: None)
    module = SimpleNamespace(init=lambda **settings: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = TrainerConfig.model_validate({"model_name": "m", "bridge": {"kind": "restart"}, "log_dir": str(tmp_path)})
    with ExitStack() as resources:
        WandbSink(config, resources, "torch").write_samples(20, [Sample("p", "a", 1.0)])
    assert logged == [({"train/samples": (["step", "prompt", "answer", "reward"], [[20, "p", "a", 1.0]])}, 20)]
