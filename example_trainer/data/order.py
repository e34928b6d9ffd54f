"""The order of the groups of a batch in a run that can be repeated (--deterministic): that of their places, whenever
they arrived.
"""

from collections import Counter
from collections.abc import Sequence

from atroposlib.groups import Untrainable
from example_trainer.data.batching import Item
from example_trainer.errors import TrainerError


def in_order(items: Sequence[Item], batch: int) -> list[int]:
    """The places of `items` among those of batch number `batch` (from 0), sorted by environment and number. Raises
    TrainerError for what cannot be put in order.
    """
    ordinals = [_ordinal(item) for item in items]
    for name, number, _ in ordinals:
        if number != batch:
            raise TrainerError(
                f"--deterministic: a group of environment {name} belongs to batch {number}, and batch {batch} is"
                " trained: start the run anew, or resume it from a checkpoint with the API's journal of the same run"
            )
    twice = [ordinal for ordinal, count in Counter(ordinals).items() if count > 1]
    if twice:
        raise TrainerError(
            f"--deterministic: several groups of batch {batch} have the place {twice[0][2]} of environment"
            f" {twice[0][0]}: give each environment a name of its own (--env.wandb_name)"
        )
    return sorted(range(len(items)), key=ordinals.__getitem__)


def _ordinal(item: Item) -> tuple[str, int, int]:
    if isinstance(item, Untrainable):
        raise TrainerError(f"--deterministic: a group of the batch cannot be read: {item}")
    if not isinstance(item.ordinal, tuple):
        raise TrainerError(
            f"--deterministic: a group of the environment with env_id {item.env_id} says nothing of its place in the"
            " run: start that environment with --env.deterministic true"
        )
    return item.ordinal
