from pathlib import Path

from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.letter_counting_server import LetterCountingEnv, Question, read_words
from tests.unit.environments.support import running_env


async def test_only_the_right_count_in_answer_tags_is_rewarded(tmp_path: Path) -> None:
    answers = ["s-t-r-a-w-b-e-r-r-y <answer>3</answer>", "<answer> 2 </answer>", "3", "<answer>three</answer>"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(LetterCountingEnv, tmp_path, server) as env,
    ):
        group, _ = await env.collect_trajectories(Question("Strawberry", "r"))
    assert group is not None
    assert group["scores"] == [1.0, 0.0, 0.0, 0.0]


async def test_questions_are_not_those_held_out_and_half_of_the_letters_occur(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(LetterCountingEnv, tmp_path, server) as env:
        questions = [await env.get_next_item() for _ in range(200)]
    assert not set(questions) & set(env.held_out)
    assert 0.5 < sum(question.count > 0 for question in questions) / 200 < 0.9
    assert all(question.count == question.word.count(question.letter) for question in questions)


async def test_words_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("banana\n\n42\nIJsvogel\n")
    async with (
        FakeInferenceServer() as server,
        running_env(LetterCountingEnv, tmp_path, server, words_path=str(tmp_path / "words.txt"), heldout_size=1) as env,
    ):
        assert {(await env.get_next_item()).word for _ in range(50)} == {"banana", "IJsvogel"}


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("\ufeffapple\r\n\npear", encoding="utf-8", newline="")
    assert read_words(path) == ["apple", "pear"]
