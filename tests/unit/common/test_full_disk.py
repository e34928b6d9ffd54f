"""A disk of `runs/` without room: rows that only record what happened wait in memory, are written when there is room,
and end no service; nor does a log that cannot be written. On a real file system of 2 MB.
"""

import asyncio
import errno
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.console.console import PlainConsole
from atroposlib.envs.commands.evaluation_report import evaluate_once
from atroposlib.envs.commands.serve import serve as serve_environment
from atroposlib.envs.errors import RecordError
from atroposlib.envs.files.records import JsonlWriter
from atroposlib.envs.metrics import JsonlSink as EnvironmentMetrics
from atroposlib.row_files import record_file
from atroposlib.row_files.kept_rows import Keep
from atroposlib.row_files.record_file import RecordFile
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from example_trainer import grpo
from example_trainer.output.metrics import JsonlSink, TensorBoardSink
from example_trainer.output.step_file import StepFile
from example_trainer.settings.config import TrainerConfig
from tests.unit.common.disk import fill, small_disk
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, server_config
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, item, model_folder, serve

pytestmark = pytest.mark.services  # `mount`

TEXT = "x" * 1000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with ExitStack() as resources:
        try:
            folder = resources.enter_context(small_disk(tmp_path / "disk"))
        except PermissionError as refused:
            pytest.skip(f"this machine lets nobody mount a file system: {refused}")
        yield folder


def samples(folder: Path, name: str = "samples.jsonl") -> Any:
    writer = JsonlWriter(folder / name)
    writer.keep(Keep(steps=1000))
    return lambda step: writer.write({"step": step, "text": TEXT}, step), writer.close, folder / name


def trained(folder: Path) -> Any:
    file = StepFile(folder / "trained.jsonl", 1, "trained groups", "--trained-path", Keep(steps=1000))
    return lambda step: file.append(step, {"step": step, "text": TEXT}), file.close, folder / "trained.jsonl"


def trainer_metrics(folder: Path) -> Any:
    sink = JsonlSink(folder / "metrics.jsonl", 1)
    return lambda step: sink.write({"step": step, TEXT: 1.0}), sink.close, folder / "metrics.jsonl"


def environment_metrics(folder: Path) -> Any:
    sink = EnvironmentMetrics(folder / "metrics.jsonl")
    return lambda step: sink.write({TEXT: 1.0}, step), sink.close, folder / "metrics.jsonl"


def evaluations(folder: Path) -> Any:
    file = RecordFile(folder / "new" / "evaluations.jsonl")
    return lambda step: file.append({"step": step, "text": TEXT}), file.close, file.path


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", [samples, trained, trainer_metrics, environment_metrics, evaluations])
def test_rows_wait_for_room_and_none_is_lost(disk: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    write, close, path = kind(disk)
    write(1)
    filler = fill(disk)
    for step in range(2, 50):
        write(step)
    assert steps_of(path)[:1] == [1]
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"{path} cannot be written: No space left on device (0.0 MB free). The run continues" in error
    assert "free space, and they are written" in error
    filler.unlink()
    write(50)
    close()
    assert steps_of(path) == [*range(1, 51)]
    assert f"{path} is written again; 0 rows are missing in it" in caplog.text


def test_the_oldest_rows_that_wait_are_dropped_and_counted(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "HELD_BYTES", 10_500)
    write, close, path = samples(disk)
    filler = fill(disk)
    for step in range(1, 101):
        write(step)
    filler.unlink()
    write(101)
    found = steps_of(path)
    assert found == [*range(found[0], 102)]
    assert f"is written again; {101 - len(found)} rows are missing in it" in caplog.text
    assert 90 <= 101 - len(found) < 101
    close()


def test_a_run_that_ends_before_there_is_room_says_what_is_missing(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write, close, path = trained(disk)
    fill(disk)
    for step in range(1, 11):
        write(step)
    written = len(steps_of(path))
    close()
    assert f"{path} ends without {10 - written} rows: No space left on device" in caplog.text


def test_a_full_part_is_moved_aside_on_a_full_disk(disk: Path) -> None:
    writer = JsonlWriter(disk / "samples.jsonl")
    writer.keep(Keep(bytes=20_000))
    filler = fill(disk)
    for step in range(1, 6):
        writer.write({"step": step, "text": TEXT}, step)
    filler.unlink()
    for step in range(6, 12):
        writer.write({"step": step, "text": TEXT}, step)
    writer.close()
    parts = writer._file.parts
    assert parts is not None
    assert parts._thread is not None
    parts._thread.join(10)
    plain = [path for path in disk.iterdir() if path.suffix == ".jsonl"]
    assert sorted(step for path in plain for step in steps_of(path))[-1] == 11


def test_data_is_not_a_record_and_its_loss_is_an_error(disk: Path) -> None:
    writer = JsonlWriter(disk / "data.jsonl")
    fill(disk)
    with pytest.raises(RecordError, match=r"cannot write .* to .*data.jsonl: No space left on device; free space"):
        writer.write({"text": TEXT * 10})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of its writer
def test_tensorboard_ends_and_the_run_goes_on(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    with ExitStack() as resources:
        sink = TensorBoardSink(disk / "tensorboard", resources)
        fill(disk)
        for step in range(1, 2000):
            sink.write({"step": step, "loss": 1.0})
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "TensorBoard gets no more of this run until it is resumed" in error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_a_trainer_goes_through_its_steps_on_a_full_disk(disk: Path, tmp_path: Path) -> None:
    filler: list[Path] = []

    def fed(delivered: int) -> list[dict[str, Any]]:
        if delivered == 1:
            filler.append(fill(disk))
        elif delivered == 3:
            filler[0].unlink()
        return [item([1.0, 0.0], seed=10 * delivered + number) for number in range(4)]

    model = model_folder(tmp_path / "model")
    with serve(FakeApi(fed)) as url:
        settings: dict[str, Any] = {"log_dir": disk / "logs", "save_path": tmp_path / "checkpoints"}
        settings |= {"training_steps": 4, "batch_size": 8, "gradient_accumulation_steps": 1, "checkpoint_interval": 0}
        grpo.run(TrainerConfig(model_name=model, atropos_url=url, tensorboard=True, **settings), RecordingBridge())
    assert steps_of(disk / "logs" / "metrics.jsonl") == [1, 2, 3, 4]
    assert sorted({*steps_of(disk / "logs" / "trained.jsonl")}) == [1, 2, 3, 4]
    assert (tmp_path / "checkpoints" / "final_model").is_dir()


async def test_an_environment_samples_posts_and_evaluates_on_a_full_disk(disk: Path) -> None:
    names = ("data_path_to_save_groups", "metrics_path", "held_out_path", "evaluations_path")
    files: dict[str, Any] = {name: str(disk / f"{name}.jsonl") for name in names}
    async with FakeInferenceServer() as server, running_api() as api:
        env = CountingEnv(config(disk, api.url, **files), server_config(server))
        filler = fill(disk)
        trainer = Trainer(api.url, num_steps=4)
        serving = asyncio.create_task(serve_environment(env))
        await trainer.register()
        await trainer.train(2)
        filler.unlink()
        await trainer.train(2)
        await asyncio.wait_for(serving, 20)
    groups = [json.loads(line) for line in (disk / "data_path_to_save_groups.jsonl").read_text().splitlines()]
    sent = {json.dumps(item["tokens"]) for batch in trainer.batches for item in batch}
    assert sent <= {json.dumps(group["tokens"]) for group in groups}
    assert (disk / "evaluations_path.jsonl").read_text()


class Evaluated(CountingEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluated.append(self._env_run.policy_version)
        await self.evaluate_log({"eval/percent_correct": 0.75}, samples=[{"q": TEXT}], verbose=False)


async def test_an_evaluation_whose_files_a_full_disk_does_not_take_is_not_lost(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeInferenceServer() as server, running_api() as api:
        settings = config(disk, api.url, data_dir_to_save_evals=str(disk / "evals"))
        fill(disk)
        env = Evaluated(settings, server_config(server))
        trainer = Trainer(api.url, num_steps=1)
        serving = asyncio.create_task(serve_environment(env))
        await trainer.register()
        await trainer.train(1)
        await asyncio.wait_for(serving, 20)
        assert env.evaluated == [*dict.fromkeys(env.evaluated)]  # no question is asked again
        assert trainer.accuracies[1] == 0.75
        alone = Evaluated(settings, server_config(server))
        async with alone._env_run as run:
            with pytest.raises(RecordError, match=r"cannot write .*evals/.*: No space left on device; free space"):
                await evaluate_once(alone, run)
    assert "eval/percent_correct" in capsys.readouterr().out


async def test_a_table_that_nobody_takes_does_not_cost_the_files_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeInferenceServer() as server:
        settings = config(tmp_path, "http://localhost:1", data_dir_to_save_evals=str(tmp_path / "evals"))
        env = Evaluated(settings, server_config(server))
        monkeypatch.setattr(sys, "stdout", Console(errno.ENOSPC))
        async with env._env_run as run:
            with pytest.raises(RecordError, match="cannot write the output: no; free space, or write elsewhere"):
                await evaluate_once(env, run)
    assert {"metrics.json", "table.txt", "samples.html"} <= {path.name for path in (tmp_path / "evals").iterdir()}


PROGRAM = """
import sys, warnings
from atroposlib.logs import configure_logging, get_logger, say
configure_logging("trainer")
for number in range(500):
    get_logger("a").error("line %d of the log", number)
    say(f"Step {number}")
    warnings.warn(f"number {number}", RuntimeWarning)
    print("a bar", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("done")
sys.exit(3)
"""


def test_a_process_whose_log_is_on_a_full_disk_goes_on_and_keeps_its_status(disk: Path, tmp_path: Path) -> None:
    with (disk / "trainer.log").open("wb") as log:
        fill(disk)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "end")], stdout=log, stderr=log, timeout=60, check=False
        )
    assert (tmp_path / "end").read_text() == "done"
    assert done.returncode == 3


class Console(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, "no")


@pytest.mark.parametrize(("number", "is_raised"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EPIPE, True)])
def test_a_console_that_is_a_file_on_a_full_disk_loses_lines(tmp_path: Path, number: int, is_raised: bool) -> None:
    console = PlainConsole(tmp_path, {}, Console(number), Console(number))
    for act in (console.put, console.put_error):
        if is_raised:
            with pytest.raises(OSError, match="no"):
                act("a line")
        else:
            act("a line")
