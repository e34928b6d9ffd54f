"""How many tokens a server has read, how many of these its KV cache had, and how many it had to read again."""

from dataclasses import dataclass


@dataclass
class ReadTokens:
    """Since the server's start."""

    prompt: int = 0  # of the requests' prompts
    cached: int = 0  # of these, found in the KV cache
    again: int = 0  # of sequences under way, after a sync or because the cache was full

    def count(self, queries: int, hits: int, again: int, again_hits: int) -> None:
        """Add what one step of the engine has looked up in its cache: tokens of new and of interrupted sequences, and
        what was found of each.
        """
        self.prompt += queries
        self.cached += hits
        self.again += again - again_hits
