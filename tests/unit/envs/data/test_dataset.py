"""Items from files of each kind, with columns by name, and errors that say where."""

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.config import resolve_config
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.data.dataset import DatasetConfig, ItemSet, held_apart, read_rows
from atroposlib.envs.errors import DataError
from atroposlib.envs.question_env import QuestionEnvConfig

ROWS = [{"prompt": f'question {number}, "quoted"', "solution": str(number)} for number in range(10)]
COLUMNS = {"question": "prompt", "answer": "solution"}
ENDINGS = [".jsonl", ".json", ".csv", ".parquet"]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    """A file of `rows` in the form that its ending names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        from datasets import Dataset

        dataset = Dataset.from_list(rows)
        (dataset.to_csv if path.suffix == ".csv" else dataset.to_parquet)(str(path))
    return str(path)


async def load(source: str, held_out: int = 3, seed: int = 1, **settings: Any) -> ItemSet[dict[str, Any]]:
    return await DatasetConfig(source=source, **settings).load(held_out, seed)


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_file_of_any_kind_gives_the_same_items_and_is_split_by_the_seed(tmp_path: Path, ending: str) -> None:
    source = write(tmp_path / f"data{ending}")
    items = await load(source, columns=COLUMNS)
    assert (len(items.train), len(items.held_out)) == (7, 3)
    everything = sorted([*items.train, *items.held_out], key=lambda item: int(item["answer"]))
    assert everything == [{"question": row["prompt"], "answer": row["solution"]} for row in ROWS]
    assert items == await load(source, columns=COLUMNS)
    assert items != await load(source, columns=COLUMNS, seed=2)
    assert items.held_out == (await load(write(tmp_path / "other.jsonl"), columns=COLUMNS)).held_out


async def test_without_columns_an_item_is_the_whole_row(tmp_path: Path) -> None:
    items = await load(write(tmp_path / "data.jsonl"))
    assert items.train[0].keys() == {"prompt", "solution"}


async def test_a_directory_and_a_second_file_have_questions_of_their_own_to_measure_with(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", ROWS[:6])
    test = write(tmp_path / "test.json", ROWS[6:])
    for items in (await load(str(tmp_path)), await load(str(tmp_path / "train.csv"), test_source=test)):
        assert [row["solution"] for row in items.train] == ["0", "1", "2", "3", "4", "5"]
        assert len(items.held_out) == 3
        assert {row["solution"] for row in items.held_out} < {"6", "7", "8", "9"}
    (tmp_path / "test.json").unlink()
    assert len((await load(str(tmp_path))).train) == 3


async def test_a_stream_repeats_the_training_items_in_another_order(tmp_path: Path) -> None:
    items = await load(write(tmp_path / "data.jsonl"))
    stream = items.stream(seed=1)
    first, second = [stream[number] for number in range(7)], [stream[number] for number in range(7, 14)]
    assert first != second
    assert sorted(map(str, first)) == sorted(map(str, second)) == sorted(map(str, items.train))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("d.jsonl", '{"prompt": "a"}\n\n{"question": "b"}', "d.jsonl:3 has no column 'prompt'; it has question"),
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": null}', "d.jsonl:2 has no value in column 'prompt'"),
        ("d.jsonl", '{"prompt": "a"}\n{"prompt', "d.jsonl:2 is not JSON"),
        ("d.jsonl", "12", "d.jsonl:1 is not an object with columns: found 12"),
        ("d.jsonl", "\n\n", "d.jsonl contains no rows"),
        ("d.json", '{"prompt": "a"}', "d.json is not a list of objects"),
        ("d.json", "[1", "d.json is not JSON"),
        ("d.json", '[{"prompt": "a"}, {}]', "d.json, object 2 has no column 'prompt'; it has none"),
        ("d.csv", "id,text\n1,a\n", "d.csv:2 has no column 'prompt'; it has id, text"),
        ("d.csv", 'id,prompt\n1,"a\nb"\n2\n', "d.csv:4 has 1 values for the 2 columns id, prompt"),
        ("d.csv", 'prompt\n"a', "d.csv is not CSV"),
        ("d.csv", "prompt\n", "d.csv contains no rows"),
        ("d.csv", b"prompt\n\xff\n", "cannot read .*d.csv: .*0xff"),
        ("d.parquet", "PAR1", "cannot read .*d.parquet: .*"),
    ],
)
async def test_what_is_wrong_with_a_file_is_told_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=complaint) as caught:
        await load(str(tmp_path / name), columns={"question": "prompt"})
    assert "\n" not in str(caught.value)


async def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    for ending in ENDINGS:
        with pytest.raises(DataError, match=f"cannot read .*none{ending}: .*No such file"):
            await load(str(tmp_path / f"none{ending}"))
    with pytest.raises(DataError, match=r"no dataset is named: pass --env.data.source"):
        await load("")
    assert read_rows(Path(write(tmp_path / "data.txt.jsonl")))[9].where.endswith("data.txt.jsonl:10")


@pytest.mark.parametrize(("questions", "held_out"), [(1, 0), (2, 1), (7, 3), (10, 5), (20, 8)])
async def test_at_least_half_of_a_file_is_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, questions: int, held_out: int
) -> None:
    rows = [{"question": f"q{number}", "answer": str(number)} for number in range(questions)]
    items = await load(write(tmp_path / "data.jsonl", rows), held_out=8)
    assert (len(items.train), len(items.held_out)) == (questions - held_out, held_out)
    told = f"Of the {questions} questions of {tmp_path}/data.jsonl, {held_out} are held out, not 8 (--env.heldout_size"
    assert (told in caplog.text) == (held_out < 8)


def as_hub(tmp_path: Path) -> str:
    """What the datasets library takes for a name at the hub where the network is not asked: a relative directory."""
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", ROWS[:6])
    write(tmp_path / "set" / "test.jsonl", ROWS[6:])
    return str(tmp_path / "set")


@pytest.mark.services
async def test_the_hub_gives_the_splits_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = as_hub(tmp_path)
    monkeypatch.setattr("atroposlib.envs.data.dataset.is_local", lambda source: False)
    items = await load(source, columns=COLUMNS)
    assert [item["answer"] for item in items.train] == list("012345")
    assert {item["answer"] for item in items.held_out} < set("6789")
    swapped = await load(source, split="test", test_split="none")
    assert sorted(row["solution"] for row in [*swapped.train, *swapped.held_out]) == list("6789")
    with pytest.raises(DataError, match=r"set, train row 1 has no column 'question'; it has prompt, solution"):
        await load(source, columns={"question": "question"})
    with pytest.raises(DataError, match=r"it has no split a or b; it has train, test; check the name and the network"):
        await load(source, split="a", test_split="b")


def test_a_setting_that_is_given_leaves_the_others_as_the_author_set_them() -> None:
    class Config(QuestionEnvConfig):
        data: DatasetConfig = DatasetConfig(
            source="openai/gsm8k", name="main", columns={"question": "q", "answer": "a"}
        )

    flags = ["--data.source", "my.csv", "--data.columns", '{"question": "prompt"}']
    data = resolve_config(Config, flags, prog="test", env={})[0].data
    assert (data.source, data.name, data.split) == ("my.csv", "main", "train")
    assert data.columns == {"question": "prompt", "answer": "a"}
    assert resolve_config(Config, [], prog="test", env={})[0].data == Config().data


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ({"source": "openai/gsm8k"}, None),  # of the hub, which is not asked
        ({"source": "mine.jsonl"}, "env.data.source: mine.jsonl does not exist"),
        ({"source": "/nowhere/at/all"}, "env.data.source: /nowhere/at/all does not exist"),
        ({"source": "openai/gsm8k", "test_source": "held_out"}, "env.data.test_source: held_out does not exist"),
        ({"source": str(Path(__file__).parent)}, None),
        ({"test_source": "~nobody-here/x"}, "env.data.test_source: ~nobody-here/x does not exist"),
        ({"test_source": "x" * 300}, f"env.data.test_source: {'x' * 300} does not exist"),  # longer than any name
    ],
)
def test_a_file_that_is_not_there_is_told_without_a_look_at_the_hub(
    settings: dict[str, str], lacks: str | None
) -> None:
    class OwnConfig(BaseEnvConfig):
        data: DatasetConfig = DatasetConfig()

    told = OwnConfig(data=DatasetConfig(**settings)).lacks()
    assert [each.partition(": correct")[0] for each in told] == ([lacks] if lacks else [])


def test_a_question_that_comes_again_is_not_on_both_sides() -> None:
    """The others keep the places that the seed gives them."""
    once = [{"question": f"{number}?"} for number in range(10)]
    held_out, train = held_apart(once, 3, seed=1, source="a.jsonl")
    assert (len(held_out), len(train)) == (3, 7)
    twice = [*once, *once]
    held_out, train = held_apart(twice, 3, seed=1, source="a.jsonl")
    assert len(held_out) == 3
    assert not [item for item in train if item in held_out]
    with pytest.raises(DataError, match=r"a\.jsonl has no question to train on that is not held out, too"):
        held_apart([once[0], once[0]], 1, seed=1, source="a.jsonl")
