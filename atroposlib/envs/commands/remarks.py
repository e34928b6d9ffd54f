"""Tells the author who runs `process` what a training run would make nothing of, though `process` can write it.

remarks_on_settings(env)      once, before the first group ──▶ log
Remarks(env, limit).look(...) at each group ──▶ log, each kind once; `tell` counts them at the end
"""

from collections import Counter
from collections.abc import Iterator

from atroposlib.envs.authors.author_errors import shown
from atroposlib.envs.payloads import NOT_TRAINED, Item, ScoredDataGroup
from atroposlib.envs.run.env_run import NO_LIMIT
from atroposlib.envs.run.environment import Environment
from atroposlib.groups import Untrainable, check
from atroposlib.logs import get_logger
from atroposlib.wire.batching import GroupRequirements

log = get_logger(__name__)

TRAINER = GroupRequirements(trainable_only=True)  # what a trainer with default settings asks of a group


def context_tokens(env: Environment) -> tuple[int, str]:
    """Return the context in tokens, and whose it is: the server's, else the tokenizer's; NO_LIMIT if none is known."""
    if env._env_run.context_tokens is not None:
        return env._env_run.context_tokens, "the server's context"
    told = getattr(env.tokenizer, "model_max_length", None)
    if isinstance(told, (int, float)) and 0 < told < NO_LIMIT:
        return int(told), "the tokenizer's limit (model_max_length)"
    return NO_LIMIT, ""


def remarks_on_settings(env: Environment, context: tuple[int, str]) -> Iterator[str]:
    """What is wrong with the settings, whatever is sampled."""
    config = env.config
    if config.group_size == 1:
        yield (
            "--env.group_size 1: an answer is compared with the others of its group, so a group of one teaches nothing."
            " Give 4 or more"
        )
    asked = getattr(config, "max_new_tokens", None)
    if asked is not None and asked >= context[0]:
        yield (
            f"--env.max_new_tokens {asked} leaves no room for a prompt: {context[1]} is {context[0]} tokens. Give"
            " fewer, or take a model and a server with a longer context"
        )


class Remarks:
    """Looks at the groups that `process` writes. `context` is in tokens, with whose it is."""

    def __init__(self, context: tuple[int, str]) -> None:
        self._context = context
        self._found = Counter[str]()

    def look(self, group: ScoredDataGroup, item: Item) -> None:
        """Log what is found in `group`, each kind the first time."""
        for kind, text in self._of(group):
            self._found[kind] += 1
            if self._found[kind] == 1:
                log.warning("The group of %s: %s", shown(item), text)

    def tell(self, groups: int) -> None:
        """Log how many of `groups` had each fault."""
        for kind, count in self._found.items():
            log.warning("%d of %d groups: %s", count, groups, kind)

    def _of(self, group: ScoredDataGroup) -> Iterator[tuple[str, str]]:
        if failed := group.get("failed"):
            causes = ", ".join(f"{count} {cause}" for cause, count in failed.items())
            yield "some of their answers have no score", f"some of its answers have no score ({causes})"
        try:
            check(group, TRAINER)
        except Untrainable as error:
            yield "a trainer would refuse them", f"a trainer would refuse it: {error}"
            return
        if not any(value != NOT_TRAINED for mask in group["masks"] for value in mask):
            yield "no token to train on", "its masks mark no token to train on; are they all -100?"
        prompt = max(_prompt_tokens(mask) for mask in group["masks"])
        if prompt >= self._context[0]:
            yield (
                "a prompt that leaves no room for an answer",
                f"its prompt has {prompt} tokens, and {self._context[1]} is {self._context[0]}: give shorter ones",
            )


def _prompt_tokens(mask: list[int]) -> int:
    """Count the tokens before the first that is trained on."""
    return next((place for place, value in enumerate(mask) if value != NOT_TRAINED), len(mask))
