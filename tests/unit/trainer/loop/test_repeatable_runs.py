"""A run with --deterministic: its weights do not depend on arrival, cores or micro-batches, and its files show it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from atropos_launcher.checks.repeated import difference, faults, shown
from atroposlib.errors import AtroposError
from atroposlib.wire.batching import ScoredData
from example_trainer import grpo
from example_trainer.data.order import in_order
from example_trainer.errors import TrainerError
from example_trainer.exact import model as exact_model
from example_trainer.loop import learner
from example_trainer.model import cpu_kernels
from example_trainer.recompute import recompute
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.manifest import digest_of_files
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, item, model_folder, serve
from tests.unit.trainer.whole_runs import config
from vllm_patching.compat import vllm_engine  # noqa: F401  loads vLLM, which starts a process, as no test may (tests/marks.py)

STEPS = 3
Groups = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    covered: dict[str, Any] = dict(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    return model_folder(tmp_path_factory.mktemp("models") / "llama", **covered, intermediate_size=96)


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer's process is one of its own; here the next test has none of its products."""
    monkeypatch.setattr(cpu_kernels, "_repeatable", False)
    yield
    cpu_kernels.exact_kernels.cache_clear()


def placed(step: int) -> Groups:
    return [
        item([1.0, 0.0, 0.0, 1.0], seed=10 * step + 1, longest=9, ordinal=["one", step, 0]),
        item([0.0, 1.0, 0.0, 0.0], seed=10 * step + 2, longest=9, ordinal=["two", step, 0]),
    ]


def run(
    model: str,
    folder: Path,
    arrived: Callable[[Groups], Groups] = lambda groups: groups,
    first: int = 0,
    fail_at: int | None = None,
    **changes: Any,
) -> Path:
    """A run directory as the launcher's."""
    known: dict[str, Any] = {
        "deterministic": True,
        "batch_invariant": True,
        "mismatch_limit": 1e3,
        "training_steps": STEPS,
    }
    known |= {"log_dir": folder, "checkpoint_interval": 1, "micro_batch_tokens": None}
    api = FakeApi(lambda delivered: arrived(placed(first + delivered)))
    settings = config(model, folder, "http://127.0.0.1:1", **known | changes)
    folder.mkdir(exist_ok=True)
    (folder / "trainer.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    with serve(api) as url:  # also vLLM, as far as it is asked
        port = int(url.rpartition(":")[2])
        settings = config(model, folder, url, vllm_host="127.0.0.1", vllm_port=port, **known | changes)
        grpo.run(settings, RecordingBridge(fail_at=fail_at))
    return folder


def trained(folder: Path) -> bytes:
    return (folder / "checkpoints/final_model/model.safetensors").read_bytes()


def test_the_weights_depend_neither_on_arrival_nor_on_micro_batches_nor_on_cores(model: str, tmp_path: Path) -> None:
    plain = run(model, tmp_path / "plain")
    others = [
        run(model, tmp_path / "reversed", lambda groups: groups[::-1]),
        run(model, tmp_path / "small", micro_batch_tokens=16),
        run(model, tmp_path / "one", threads=1),
    ]
    for other in others:
        assert trained(other) == trained(plain)
        assert difference(plain, other) is None
        assert (other / "batches.jsonl").read_bytes() == (plain / "batches.jsonl").read_bytes()
    assert not list(faults(plain))


def test_the_start_model_that_the_policy_is_compared_with_computes_the_same_bits(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's own products, KL was not 0 before the first update, and depended on cores; with a model so small,
    its bits are the same.
    """
    exact = list[PreTrainedModel]()

    def make_exact(which: PreTrainedModel, *how: Any) -> None:
        exact.append(which)
        exact_model.make_exact(which, *how)

    monkeypatch.setattr(learner, "make_exact", make_exact)
    folder = run(model, tmp_path / "run", kl_coef=0.1)
    policy, start = exact
    assert policy is not start
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["kl"] == 0
    assert rows[1]["kl"] > 0
    assert recompute(folder, STEPS)


def test_a_run_that_is_killed_and_resumed_has_the_same_chain(model: str, tmp_path: Path) -> None:
    plain = run(model, tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "killed", fail_at=3)
    killed = run(model, tmp_path / "killed", first=2, resume="latest")
    assert trained(killed) == trained(plain)
    assert difference(plain, killed) is None
    assert not list(faults(killed))


@pytest.mark.parametrize(("interval", "done"), [(1, 3), (2, 2)])
def test_a_finished_run_that_is_resumed_and_killed_is_as_its_trainer_wrote_it(
    model: str, tmp_path: Path, interval: int, done: int
) -> None:
    """Its trained model is of step 3, which it does again at another rate where its last checkpoint is of step 2."""
    folder = run(model, tmp_path / "run", checkpoint_interval=interval)
    finished = trained(folder)
    more: dict[str, Any] = {"resume": "latest", "training_steps": done + 3, "lr": 2e-2}
    for fail_at in (done + 1, done + 3):
        with pytest.raises(KeyboardInterrupt):
            run(model, folder, first=done, fail_at=fail_at, **more)
        assert trained(folder) == finished
        assert not list(faults(folder))
    run(model, folder, first=done + 2, **more)
    assert trained(folder) != finished
    assert not list(faults(folder))
    (folder / "checkpoints/final_model/model.safetensors").write_bytes(finished)
    assert [fault.partition(":")[0] for fault in faults(folder)] == [
        f"checkpoints/final_model does not have the weights of step {done + 3}"
    ]


def test_a_step_is_computed_again_from_the_checkpoint_before_it_or_the_start(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(model, tmp_path / "run")
    assert recompute(folder, STEPS)
    assert "step_2)" in capsys.readouterr().out
    for checkpoint in (folder / "checkpoints").glob("step_*"):
        shutil.rmtree(checkpoint)
    assert recompute(folder, 2)
    with pytest.raises(TrainerError, match="has no step 9"):
        recompute(folder, 9)
    rows = rewritten(folder / "batches.jsonl", 3, lambda row: row["scores"].reverse())
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert not recompute(folder, 2)
    assert "DIFFERENT" in capsys.readouterr().out


def test_an_average_is_computed_again_where_a_run_ended_with_it_and_went_on(model: str, tmp_path: Path) -> None:
    folder = run(model, tmp_path / "run", ema_decay=0.75)
    assert recompute(folder, STEPS)
    run(model, folder, first=STEPS, resume="latest", training_steps=STEPS + 2, ema_decay=0.75)
    for checkpoint in (folder / "checkpoints").glob("step_*"):
        shutil.rmtree(checkpoint)
    assert all(recompute(folder, step) for step in range(STEPS - 1, STEPS + 3))


def rewritten(path: Path, line: int, change: Callable[[dict[str, Any]], object]) -> Groups:
    rows: Groups = [json.loads(each) for each in path.read_text().splitlines()]
    change(rows[line])
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    return rows


@pytest.mark.parametrize(
    ("file", "line", "change", "told"),
    [
        ("batches.jsonl", 2, lambda row: row["scores"].__setitem__(0, 0.5), "step 2: a group in batches.jsonl"),
        ("metrics.jsonl", 1, lambda row: row.__setitem__("sha256/weights", "0" * 64), "step 2: its row"),
        ("metrics.jsonl", 2, lambda row: row.__setitem__("sha256/weights_before", "0" * 64), "step 3 began with"),
        ("metrics.jsonl", 2, lambda row: row.__setitem__("step", 4), "step 3 has no row"),
    ],
)
def test_what_was_changed_afterwards_is_named_at_its_step(
    model: str, tmp_path: Path, file: str, line: int, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    folder = run(model, tmp_path / "run")
    rewritten(folder / file, line, change)
    assert next(faults(folder)).startswith(told)


def test_a_changed_checkpoint_is_named(model: str, tmp_path: Path) -> None:
    folder = run(model, tmp_path / "run")
    file = folder / "checkpoints/step_3/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert [fault.partition(":")[0] for fault in faults(folder)] == [
        "checkpoints/step_3 does not have the weights of step 3"
    ]
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["weights_sha256"] == digest_of_files(folder / "checkpoints/final_model")
    assert receipt["gradient_kernels"] == "onednn"


@pytest.fixture(scope="module")
def finished(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(model, tmp_path_factory.mktemp("finished") / "run")


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))


def written(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def linked(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


METRICS, BATCHES, RECEIPT = "metrics.jsonl", "batches.jsonl", "receipt.json"
WEIGHTS = "checkpoints/final_model/model.safetensors"


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        (METRICS, lines(lambda rows: [*rows[:2], rows[1], *rows[2:]]), r"line 3: step 2 stands behind step 2"),
        (METRICS, lines(lambda rows: [rows[1], rows[0], *rows[2:]]), r"line 2: step 1 stands behind step 2"),
        (METRICS, lines(lambda rows: [*rows[:2], b"[]\n", *rows[2:]]), r"line 3 was changed"),
        (METRICS, lines(lambda rows: [rows[0].replace(b'"step":1', b'"step":null'), *rows[1:]]), r"line 1 was changed"),
        (METRICS, lines(lambda rows: rows[:-1]), r"batches.jsonl has groups of step 3, of which there is no row"),
        (METRICS, pipe, "pipe"),
        (METRICS, linked, "link"),
        (BATCHES, lines(lambda rows: [*rows, rows[0]]), r"line 7: a group of step 1 stands behind one of step 3"),
        (BATCHES, lines(lambda rows: [rows[2], *rows]), r"line 2: a group of step 1 stands behind one of step 2"),
        (BATCHES, lines(lambda rows: [b"5\n", *rows]), r"line 1 was changed"),
        (BATCHES, lambda file: file.write_bytes(file.read_bytes()[:-50]), r"line 6 was cut or changed"),
        (BATCHES, pipe, "pipe"),
        (BATCHES, linked, "link"),
        (RECEIPT, lines(lambda rows: [row.replace(b'chain_sha256": "', b'chain_sha256": "x') for row in rows]),
         r"step 3 is not the one after which receipt.json was written"),
        (RECEIPT, written(b"[]"), "receipt.json"),
        (RECEIPT, written(b'{"steps": -1}'), "receipt.json"),
        (RECEIPT, pipe, "pipe"),
        (WEIGHTS, written((2).to_bytes(8, "little") + b"[]"), "final_model"),
        (WEIGHTS, written((7).to_bytes(8, "little") + b'{"a":5}'), "final_model"),
        (WEIGHTS, written(b"\xff" * 8), "a header of"),
        (WEIGHTS, written(b""), "final_model"),
        (WEIGHTS, lambda file: file.write_bytes(file.read_bytes()[:-5]), "was cut"),
        (WEIGHTS, pipe, "pipe"),
        ("checkpoints/step_\u00b2/model.safetensors", written(b""), None),
    ],
)  # fmt: skip
def test_a_directory_that_somebody_sent_is_read_with_suspicion(
    finished: Path, tmp_path: Path, file: str, change: Callable[[Path], object], told: str | None
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / file).parent.mkdir(exist_ok=True)
    change(folder / file)

    def first() -> str | None:
        try:
            return next(faults(folder), None)
        except AtroposError as error:
            return str(error)

    found = first()
    assert found is told or re.search(told or "", found or ""), found


def test_a_run_whose_last_step_was_cut_everywhere_is_known_by_its_receipt(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    lines(lambda rows: rows[:-1])(folder / METRICS)
    lines(lambda rows: rows[:-2])(folder / BATCHES)
    assert list(faults(folder)) == ["receipt.json was written after step 3, and metrics.jsonl ends with step 2"]


def test_the_first_difference_of_two_runs_is_told_with_both_values(model: str, tmp_path: Path) -> None:
    def other_score(groups: Groups) -> Groups:
        if groups[0]["ordinal"][1] == 1:
            groups[1]["inference_logprobs"][2][-1] -= 0.25
        return groups

    one, other = run(model, tmp_path / "one"), run(model, tmp_path / "other", other_score)
    found = difference(one, other)
    assert found is not None
    assert found.startswith("step 2: group 2 (two, number 0), sequence 3, token ")
    assert found.count("(0x") == 2
    weights = run(model, tmp_path / "rate", lr=2e-2)
    assert str(difference(one, weights)).startswith("step 1 made other weights of equal groups")
    with pytest.raises(AtroposError, match="ran without --deterministic"):
        list(faults(run(model, tmp_path / "plain", deterministic=False, batch_invariant=False)))


def test_floats_are_shown_with_their_bits() -> None:
    assert shown(0.5) == "0.5 (0x3f000000)"
    assert shown(0.1) == "0.1 (0x3fb999999999999a)"
    assert shown(1e300) == "1e+300 (0x7e37e43c8800759c)"
    assert shown(3) == "3"


@pytest.mark.parametrize(
    ("ordinals", "told"),
    [
        ([["one", 0, 0], None], "says nothing of its place"),
        ([["one", 0, 0], ["one", 1, 1]], "belongs to batch 1, and batch 0 is trained"),
        ([["one", 0, 1], ["one", 0, 1]], "several groups of batch 0 have the place 1 of environment one"),
    ],
)
def test_a_batch_that_has_no_order_ends_the_run(ordinals: list[Any], told: str) -> None:
    plain = dict(tokens=[[1]], masks=[[1]], scores=[0.0])
    groups = [
        ScoredData(**plain, **({"ordinal": tuple(ordinal)} if ordinal else {}))  # type: ignore[arg-type]
        for ordinal in ordinals
    ]
    with pytest.raises(TrainerError, match=told):
        in_order(groups, 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"batch_invariant": False}, "--deterministic needs --batch-invariant"),
        ({"overlap": True}, "--overlap adds up"),
        ({"logits_chunk_mb": 64}, "--logits-chunk-mb 64"),
    ],
)
def test_flags_that_cannot_be_repeated_are_refused(fields: dict[str, Any], told: str) -> None:
    known = {"model_name": "m", "deterministic": True, "batch_invariant": True}
    with pytest.raises(ValueError, match=told):
        TrainerConfig.model_validate(known | fields)


def test_products_that_depend_on_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_threads(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right.t() + torch.get_num_threads()

    monkeypatch.setattr(cpu_kernels, "onednn_product", by_threads)
    with pytest.raises(TrainerError, match="depend on the number of threads"):
        cpu_kernels.take_repeatable_products(torch.nn.Sequential(torch.nn.Linear(8, 4)))
