"""`atropos-dpo-gen FILE`: pairs of a good and a bad sample of running environments, for preference training.

A line is {"prefix", "pos", "neg", "score", "neg_score"}; with --save-messages there is no prefix and pos and neg are
messages.
"""

from collections.abc import Iterator

from pydantic import Field

from atroposlib.compat.commands.generation import GenerationConfig, messages_of, prompt_and_completion, ranked, run
from atroposlib.utils.tokenizers import Tokenizer
from atroposlib.wire.batching import ScoredData


class DpoConfig(GenerationConfig):
    """Write preference pairs for DPO from the groups of a batching API."""

    save_n_pairs_per_group: int = Field(
        default=3, ge=1, description="Pairs to keep per group: best with worst, second best with second worst, ..."
    )
    minimum_score_diff_max_min: float = Field(
        default=0.5, ge=0, description="Smallest difference between the scores of a pair."
    )
    tasks_per_step: int = Field(default=8, ge=1, description="Groups per batch.")


def records(config: DpoConfig, group: ScoredData, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """The lines of one group."""
    order, scores = ranked(config, group), group.scores
    for good, bad in list(zip(order, reversed(order), strict=True))[
        : min(config.save_n_pairs_per_group, len(order) // 2)
    ]:
        difference = scores[good] - scores[bad]
        if (
            difference <= 0
            or difference < config.minimum_score_diff_max_min
            or (scores[good] < 0 and not config.allow_negative_scores)
        ):
            continue
        if config.save_messages:
            pair: dict[str, object] = {"pos": messages_of(group, good), "neg": messages_of(group, bad)}
        else:
            prefix, positive = prompt_and_completion(group, good, tokenizer)
            pair = {"prefix": prefix, "pos": positive, "neg": prompt_and_completion(group, bad, tokenizer)[1]}
        yield {**pair, "score": scores[good], "neg_score": scores[bad]}


def main() -> None:
    """Command line."""
    run(DpoConfig, "atropos-dpo-gen", records)


if __name__ == "__main__":
    main()
