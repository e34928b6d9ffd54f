"""`atropos-sft-gen FILE`: the best samples of running environments, for supervised fine-tuning.

A line is {"prefix", "completion", "score"}, or with --save-messages {"messages", "score"}.
"""

from collections.abc import Iterator

from pydantic import Field

from atroposlib.compat.commands.generation import (
    GenerationConfig,
    messages_of,
    prompt_and_completion,
    ranked,
    run,
    sequences_with,
)
from atroposlib.utils.tokenizers import Tokenizer
from atroposlib.wire.batching import ScoredData


class SftConfig(GenerationConfig):
    """Write the best samples of a batching API's groups as SFT records."""

    save_top_n_per_group: int = Field(default=3, ge=1, description="Samples to keep per group, best first.")


def records(config: SftConfig, group: ScoredData, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """The lines of one group."""
    for index in ranked(config, group)[: config.save_top_n_per_group]:
        score = group.scores[index]
        if score < 0 and not config.allow_negative_scores:
            continue
        if config.save_messages:
            yield {"messages": messages_of(group, index), "score": score}
            continue
        for sequence in sequences_with(group, index):
            prefix, completion = prompt_and_completion(group, sequence, tokenizer)
            yield {"prefix": prefix, "completion": completion, "score": score}


def main() -> None:
    """Command line."""
    run(SftConfig, "atropos-sft-gen", records)


if __name__ == "__main__":
    main()
