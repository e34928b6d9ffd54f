"""What an environment tells a fake inference server (`atroposlib/testing/fake_inference_server.py`) under `process` and
`evaluate`.

    GET  /v1/models ──▶ data[0]: {"owned_by": FAKE, "right_answers": true}    the server is a fake one
    POST /fake          Told: the environment's tokenizer, and the reference answer of its current item

A server that does not say that it is a fake one is told nothing, and only `process`, which trains and measures nothing,
tells reference answers: no policy can learn from them.
"""

from msgspec import Struct

FAKE = "atropos-fake"
ROUTE = "/fake"


class FakeModel(Struct):
    """Holds what the model in /v1/models shows of its server. One with `right_answers` needs reference answers."""

    owned_by: str = ""
    right_answers: bool = False


class FakeModels(Struct):
    """The reply of /v1/models."""

    data: list[FakeModel]


class Told(Struct):
    """A tokenizer's directory or hub name, and the right answer to what is asked next; None for what is unknown."""

    tokenizer: str | None = None
    reference: str | None = None
