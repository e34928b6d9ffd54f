"""Which protocol a server speaks."""

from collections.abc import Callable, Mapping
from typing import Literal

from sampler_doctor.servers.completions import Completions
from sampler_doctor.servers.generate import Generate
from sampler_doctor.servers.sampler import Broken, CannotTest, NotOffered, Refused, Sampler

Protocol = Literal["auto", "completions", "generate"]


def open_sampler(
    url: str,
    key: str | None,
    answer_s: float,
    *,
    protocol: Protocol,
    model: str | None,
    names: Callable[[], Mapping[str, int]],
    vocabulary: int,
) -> Sampler:
    """Return a client of the server at `url`, which has answered. Raises CannotTest."""
    generate = Generate(url, key, answer_s, vocabulary)
    try:
        if protocol == "generate" or (protocol == "auto" and _is_sglang(generate)):
            generate.open(model)
            return generate
        completions = Completions(url, key, answer_s, names)
        completions.open(model)
    except Broken as error:
        raise CannotTest(f"{url}: {error}; start the server, or correct --sampler") from None
    except Refused as error:
        raise CannotTest(f"{url}{error}") from None
    except NotOffered as error:
        raise CannotTest(f"{url} gives no log-probabilities of tokens, and no row can be run: {error}") from None
    return completions


def _is_sglang(server: Generate) -> bool:
    for path in ("/model_info", "/get_model_info"):
        try:
            server.get(path)
        except NotOffered:
            continue
        return True
    return False
