"""docs/trainer.md: steps of batches in which few groups have a signal are not small in proportion."""

import pytest

from benchmarks.few_groups import FewGroupsConfig, compared
from example_trainer.settings.objectives import Algorithm


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_one_group_of_eight_moves_the_weights_far_more_than_an_eighth_of_the_way(algorithm: Algorithm) -> None:
    config = FewGroupsConfig(full_steps=3, steps=4, group_size=4, tokens=8)
    steps = compared(config, algorithm, seed=1)
    assert all(0.5 < movement < 1 for movement, _ in steps)
    assert all(gradient < 0.8 for _, gradient in steps)


def test_the_same_seed_gives_the_same_figures() -> None:
    config = FewGroupsConfig(full_steps=1, steps=1, groups=2, group_size=2, tokens=4)
    assert compared(config, "grpo", seed=1) == compared(config, "grpo", seed=1)
