"""Which questions are asked again."""

import pytest

from atroposlib.envs.data.repeats import Repeats


def answered(repeats: Repeats, key: str, number: int, *scores: float) -> None:
    repeats.note_asked(key, number)
    repeats.note_scores(key, scores)


def test_the_most_uneven_question_comes_first_and_of_equal_ones_the_oldest() -> None:
    repeats = Repeats(1.0)
    answered(repeats, "nearly solved", 0, 1, 1, 1, 0)
    answered(repeats, "half, older", 1, 1, 1, 0, 0)
    answered(repeats, "half, newer", 2, 0, 1, 0, 1)
    answered(repeats, "solved", 3, 1, 1, 1, 1)
    answered(repeats, "hopeless", 4, 0, 0, 0, 0)
    answered(repeats, "solved, but for rounding", 5, 0.1 + 0.2, 0.3)
    given = []
    while (number := repeats.next_number()) is not None:
        given.append(number)
        repeats.note_asked({0: "nearly solved", 1: "half, older", 2: "half, newer"}[number], number)
    assert given == [1, 2, 0]


@pytest.mark.parametrize(
    ("share", "again"), [(0.0, 0), (0.25, 25), (0.3, 30), (0.5, 50), (0.7, 70), (0.9, 90), (1.0, 100)]
)
def test_the_share_is_kept_whatever_there_was_before(share: float, again: int) -> None:
    repeats = Repeats(share)
    assert [repeats.next_number() for _ in range(40)] == [None] * 40  # nothing is known: no debt arises
    found = 0
    for _ in range(100):
        answered(repeats, "half", 7, 1, 0)
        found += repeats.next_number() is not None
    assert abs(found - again) <= 1


def test_a_question_is_not_given_again_while_its_answers_are_awaited() -> None:
    repeats = Repeats(1.0)
    answered(repeats, "half", 7, 1, 0)
    repeats.note_asked("half", 7)
    assert repeats.next_number() is None
    repeats.note_scores("half", [1, 1])  # it is solved now
    assert repeats.next_number() is None


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    repeats = Repeats(1.0, remembered=2)
    for number in range(9):
        repeats.note_asked(f"lost {number}", number)  # a group that failed: no scores follow
        answered(repeats, str(number), number, 1, 0)
    assert [key for key, _, _ in repeats.state] == ["7", "8"]
    assert len(repeats._asked) <= 2


def test_a_checkpoint_has_what_is_remembered() -> None:
    before, after = Repeats(1.0), Repeats(1.0)
    answered(before, "half", 7, 1, 0)
    after.state = before.state
    assert after.next_number() == 7
