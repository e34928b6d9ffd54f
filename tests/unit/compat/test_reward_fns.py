from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.compat.reward_fns import BaseReward, CombinedReward, RewardFunction, register_reward, registry
from atroposlib.compat.reward_fns.chandas_meter_reward import syllables
from atroposlib.compat.reward_fns.registry import BUILT_IN

NEEDS_SOLUTION = {"accuracy", "accuracyx", "r1", "cascadingr1math"}


def test_every_built_in_reward_is_made_by_name_and_scores() -> None:
    for name in BUILT_IN:
        reward = registry.create(name, **({"rewards": ["length"]} if name == "combined" else {}))
        solution = {"solution": "4"} if name in NEEDS_SOLUTION else {}
        scores = reward(
            ["<think>2 + 2</think> <answer>4</answer>", [{"role": "assistant", "content": "5"}]], **solution
        )
        assert len(scores) == 2, name
        assert all(isinstance(score, float) for score in scores), name


@pytest.mark.parametrize(
    "name", ["accuracy", "accuracy_reward", "AccuracyReward", "reasoning_steps", "cascading_r1_math"]
)
def test_names_ignore_case_underscores_and_the_word_reward(name: str) -> None:
    assert issubclass(registry.get(name), RewardFunction)


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(KeyError, match="no reward 'acuracy'; did you mean 'accuracy'"):
        registry.create("acuracy")
    with pytest.raises(KeyError, match="no reward 'nothing'"):
        registry.load_required_functions({"reward_functions": ["format", {"type": "nothing"}]})


def test_the_rewards_that_a_configuration_names_are_found_in_dicts_and_objects() -> None:
    kind = {"reward_funcs": ["r1"]}
    dataset = SimpleNamespace(dataset_reward_funcs=["length"], reward_funcs=None, types=[kind])
    config = SimpleNamespace(datasets=[dataset], reward_functions=["format", {"type": "accuracy"}])
    assert registry.load_required_functions(config) == {"length", "r1", "format", "accuracy"}
    assert registry.load_required_functions({"reward_funcs": ["format"]}) == {"format"}
    with pytest.raises(KeyError, match="no reward 'nothing'"):
        registry.load_required_functions(SimpleNamespace(datasets=[{"types": [{"reward_funcs": ["nothing"]}]}]))


def test_a_plain_function_is_a_reward_of_its_own_and_in_a_sum() -> None:
    def short(completions: list[str], limit: int = 3, **kwargs: Any) -> list[float]:
        return [float(len(text) <= limit) for text in completions]

    def always(completions: list[str], **kwargs: Any) -> float:
        return 0.5

    assert registry.create(short, weight=2.0, limit=4)(["four", "fives"]) == [2.0, 0.0]
    both = CombinedReward([short, always, {"type": "length", "params": {"target_words": 1}}])
    assert both(["one", "three"]) == [2.5, 1.5]
    assert both.name == "combined_short_always_lengthreward"
    logged: list[dict[str, float]] = []
    reward = registry.create(short, weight=2.0)
    reward.set_wandb_logger(SimpleNamespace(log=logged.append))
    reward(["one", "three"])
    name = "reward/short"
    assert logged == [{f"{name}/mean_raw": 0.5, f"{name}/mean_weighted": 1.0, f"{name}/min": 0.0, f"{name}/max": 1.0}]


@pytest.mark.services
@pytest.mark.parametrize(
    ("completion", "solution", "score"),
    [
        (r"So \boxed{12}.", "12", 1.0),
        ("<think>It is 5.</think> It is 12.", "#### 12", 1.0),
        ("<think>It is 12.</think> It is 5.", "12", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1,250}", "1250", 1.0),
        (r"\boxed{1/0}", "0", 0.0),
        (r"\boxed{1}" * 7, "1", 0.0),
        ("I do not know", "1", 0.0),
    ],
)
def test_accuracy_compares_answers(completion: str, solution: str, score: float) -> None:
    assert registry.create("accuracy")([completion], solution=[solution]) == [score]


def test_length_and_think_format_rewards() -> None:
    assert registry.create("length", target_words=4)(["one two", "one two three four five"]) == [0.5, 1.0]
    texts = [
        "<think>a</think> b",
        "<think>a</think>",
        "<think></think> b",
        "b",
        "<think>a</think> b <think>c</think>",
        "x <think>a</think> b",
    ]
    assert registry.create("think_format", weight=2.0)(texts) == [2.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_thoughts_that_the_chat_template_has_opened_are_thoughts() -> None:
    """Templates of reasoning models end the prompt with <think>, so that the completion has the closing tag alone."""
    texts = ["a</think> <answer>4</answer>", "a</think>", "</think> 4", "a</think> 4 <think>b</think>", "4"]
    assert registry.create("think_format")(texts) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert registry.create({"type": "format", "params": {"require_all_tags": True}})(texts) == [1.0, 0, 0, 0, 0]
    assert registry.create("r1")(["a</think> 4", "a</think> 5", "4"], solution="4") == [1.5, 0.5, 1.0]


def test_format_counts_tags_with_content() -> None:
    texts = ["<think>a</think>", "<THINK>a</THINK><answer>b</answer>", "<think> </think>"]
    assert registry.create("format")(texts) == [1.0, 1.0, 0.0]
    assert registry.create({"type": "format", "params": {"require_all_tags": True}})(texts) == [0.0, 1.0, 0.0]


def test_r1_adds_format_and_answer_and_the_cascade_wants_the_format_first() -> None:
    texts = ["<think>a</think> 4", "<think>a</think> 5", "4"]
    assert registry.create("r1")(texts, solution="4") == [1.5, 0.5, 1.0]
    assert registry.create("cascading_r1_math")(texts, solution="4") == [1.5, 0.5, 0.0]


def test_repetition_costs() -> None:
    fresh = "The cat sat quietly near a warm stove. Outside, heavy rain was falling on every roof in town."
    reward = registry.create("repetition_penalty")
    scores = reward([fresh, f"{fresh} {fresh}", f"{fresh}\n\n{fresh}", "Short."])
    assert scores[0] == 0.0
    assert -0.6 < scores[1] < 0.0
    assert scores[2] <= -0.6
    assert scores[3] == -0.1


def test_combination_weighs_and_normalises() -> None:
    parts = [{"type": "length", "weight": 1.0, "params": {"target_words": 2}}, {"type": "format", "weight": 3.0}]
    texts = ["one two", "<answer>one</answer> two", "one"]
    assert CombinedReward(parts)(texts) == [1.0, 4.0, 0.5]
    assert CombinedReward(parts, normalization="sum")(texts) == [0.25, 1.0, 0.125]
    assert CombinedReward(parts, normalization="minmax")(texts)[1:] == [1.0, 0.0]


def test_own_rewards_are_registered_and_what_they_raise_is_not_a_zero() -> None:
    @register_reward("politeness")
    class Polite(BaseReward):
        def score(self, completion: str, **kwargs: Any) -> float:
            return float("please" in completion)

    @registry.register
    class BrokenReward(RewardFunction):
        def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
            raise ZeroDivisionError("no words")

    registry.register_function("constant", lambda completions, value=1.0, **kwargs: [value] * len(completions))
    assert registry.create("politeness")(["please", "now"]) == [1.0, 0.0]
    assert registry.create("constant", value=3.0)(["a", "b"]) == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="the reward 'brokenreward' failed on 1 completions: no words"):
        registry.create("broken")(["a"])


def test_syllables_are_weighed_by_vowel_and_by_what_follows() -> None:
    assert syllables("dharmakṣetre kurukṣetre") == "GGGGLGGG"
    line = "syādindravajrā yadi tau jagau gaḥ"
    assert registry.create("chandas_meter", meter="indravajra")([line]) == [1.0]


def test_a_reward_that_was_made_already_is_taken() -> None:
    made = registry.create("length", target_words=2, weight=0.5)
    assert registry.create(made) is made
    assert registry.create({"type": "combined", "params": {"rewards": [made]}})(["two words"]) == [0.5]
