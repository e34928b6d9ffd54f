"""What conversations read again after each sync, with --kv-on-sync reset, keep and salt, and how far stale keys and
values move a policy.

    python -m benchmarks.kv_on_sync [--conversations 16] [--turns 6] [--every-s 2] [--compared 4] [--rounds 2]

Each arm starts a real vLLM server with the quickstart's model. A trainer in this process syncs by broadcast every
`--every-s` seconds; each sync moves every weight by `--move`, up or down, as a step of AdamW with that learning rate
does. Four conversations at a time ask for `--turns` turns, each with its X-Session-ID: the server counts what it reads,
finds in its cache, and reads again. Then some conversations are asked one by one, each last turn is read again whole
under the same version, and the log-probabilities of its tokens are compared. Arms alternate. Prints what each has
seen, and a Markdown table at the end.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  as the trainer does

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.logs import configure_logging
from atroposlib.wire.sessions import SESSION_HEADER
from benchmarks.shared.vllm_server import free_port, vllm_server
from example_trainer.bridges import WeightBridge, make_bridge
from example_trainer.quickstart_model import cached_model
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.by_rank import SharedRanks
from example_trainer.weights.load import load_trained
from vllm_patching.kv_cache import ON_SYNC

AT_ONCE = 4
PROMPT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 256, 32, 48


class Flags(Config):
    """Measure what the KV cache saves over syncs."""

    conversations: int = Field(16, ge=1, description="Conversations of each arm and round.")
    turns: int = Field(6, ge=1, description="Turns of each conversation.")
    every_s: float = Field(2.0, gt=0, description="Seconds from one sync to the next.")
    compared: int = Field(4, ge=0, description="Conversations of each arm and round whose last turn is read again.")
    rounds: int = Field(2, ge=1, description="Rounds of all arms.")
    move: float = Field(1e-5, gt=0, description="How far each weight moves in a sync.")


@dataclass
class Seen:
    """What one arm of one round has seen."""

    seconds: float
    syncs: int
    prompt_tokens: int
    cached_tokens: int
    tokens_again: int
    differences: list[float] = field(default_factory=list)  # in nats, of tokens whose version is one

    @property
    def computed(self) -> int:
        """Tokens that the server read."""
        return self.prompt_tokens - self.cached_tokens + self.tokens_again


class Served:
    """A server of one arm."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False)

    def counted(self) -> dict[str, int]:
        """What the server has read so far."""
        found: dict[str, int] = self._client.get("/v1/bridge/activity").raise_for_status().json()
        return found

    def ask(self, prompt: list[int], session: str = "", **sampling: object) -> dict[str, Any]:
        """Its reply to one request."""
        body = {"prompt": {"prompt_token_ids": prompt}, "ignore_eos": True, **sampling}
        reply = self._client.post("/generate", json=body, headers={SESSION_HEADER: session} if session else {})
        generated: dict[str, Any] = reply.raise_for_status().json()
        return generated

    def converse(self, name: str, seed: int, turns: int) -> tuple[list[int], dict[str, Any]]:
        """A conversation whose turns are the same tokens in each arm but for the answers: the last prompt, and the
        last reply.
        """
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(100, 40_000, (PROMPT_TOKENS,), generator=draw).tolist()
        reply: dict[str, Any] = {}
        for turn in range(turns):
            if turn:
                question = torch.randint(100, 40_000, (QUESTION_TOKENS,), generator=draw).tolist()
                tokens = [*tokens, *reply["token_ids"][0], *question]
            reply = self.ask(tokens, name, max_tokens=ANSWER_TOKENS, logprobs=0, seed=seed)
        return tokens, reply

    def differences(self, name: str, seed: int, turns: int) -> list[float]:
        """How far the log-probabilities of a last turn are from those of the whole text, read at once without the
        cache; none where a sync came between.
        """
        prompt, reply = self.converse(name, seed, turns)
        answer = reply["token_ids"][0]
        whole = self.ask([*prompt, *answer], max_tokens=1, prompt_logprobs=0)
        if whole["policy_versions"] != reply["policy_versions"] or len(reply["version_spans"][0]) != 1:
            return []
        sampled = [next(iter(position[0].values())) for position in reply["logprobs"][0]]
        read = [
            position[str(token)]
            for token, position in zip(answer, whole["prompt_logprobs"][len(prompt) :], strict=True)
        ]
        return [abs(one - other) for one, other in zip(sampled, read, strict=True)]


class Syncing:
    """Syncs in the background, every few seconds, while the block runs."""

    def __init__(self, bridge: WeightBridge, update: Callable[[], None], every_s: float) -> None:
        self._bridge, self._update, self._every_s = bridge, update, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.version = 0

    def __enter__(self) -> "Syncing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.version += 1
            self._bridge.sync(self.version, self._update)


@contextlib.contextmanager
def trainer(model: str, port: int, move: float) -> Iterator[tuple[WeightBridge, Callable[[], None]]]:
    """A bridge by which the server serves version 0, and what changes the weights for the next one."""
    config = TrainerConfig(model_name=model, vllm_ports=(port,), bridge={"kind": "broadcast"})
    device = torch.device("cpu")
    prepared = make_bridge(config)(model, device)
    assert not isinstance(prepared.storage, SharedRanks)  # one process trains
    trained = load_trained(config, model, device, prepared.storage)
    parameters = [parameter for parameter in trained.model.parameters() if parameter.requires_grad]
    draw = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def update() -> None:
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=draw).sign_(), alpha=move)

    with contextlib.closing(prepared.connect(trained)) as bridge:
        bridge.sync(0, lambda: None)
        yield bridge, update


def measure(kept: str, model: str, flags: Flags, round_number: int) -> Seen:
    """One arm of one round."""
    port = free_port()
    with (
        vllm_server(model, port, ["--max-model-len", "2048", "--kv-on-sync", kept]),
        trainer(model, port, flags.move) as (bridge, update),
    ):
        served = Served(port)
        before, start = served.counted(), time.monotonic()
        with Syncing(bridge, update, flags.every_s) as syncing, ThreadPoolExecutor(AT_ONCE) as pool:
            seeds = [1000 * round_number + seed for seed in range(flags.conversations)]
            done = [pool.submit(served.converse, f"c{seed}", seed, flags.turns) for seed in seeds]
            for each in done:
                each.result()
            seconds, syncs = time.monotonic() - start, syncing.version
            after = served.counted()
            differences = [
                difference
                for seed in seeds[: flags.compared]
                for difference in served.differences(f"d{seed}", seed, flags.turns)
            ]
    spent = {name: after[name] - before[name] for name in ("prompt_tokens", "cached_tokens", "tokens_again")}
    return Seen(seconds, syncs, **spent, differences=differences)


def main() -> None:
    flags = load_config(Flags, prog="kv_on_sync")
    configure_logging("benchmark")
    model = str(cached_model())
    seen: dict[str, list[Seen]] = {kept: [] for kept in ON_SYNC}
    for number in range(flags.rounds):
        for kept in ON_SYNC if number % 2 == 0 else reversed(ON_SYNC):
            seen[kept].append(one := measure(kept, model, flags, number))
            print(
                f"Round {number + 1}, {kept}: {one.seconds:.1f} s, {one.syncs} syncs, {one.computed} of"
                f" {one.prompt_tokens} prompt tokens computed, {len(one.differences)} tokens compared",
                flush=True,
            )
    print(
        "| `--kv-on-sync` | seconds | syncs | prompt tokens | computed | to reset | again | difference, nats (tokens) |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for arm, rounds in seen.items():
        ratios = [each.computed / other.computed for each, other in zip(rounds, seen["reset"], strict=True)]
        differences = [difference for each in rounds for difference in each.differences]
        mean = (
            f"{statistics.mean(differences):.2g} ({len(differences)} tokens)"
            if differences
            else "no turn between syncs"
        )
        cells = [
            " ".join(f"{each.seconds:.1f}" for each in rounds),
            " ".join(str(each.syncs) for each in rounds),
            " ".join(str(each.prompt_tokens) for each in rounds),
            " ".join(str(each.computed) for each in rounds),
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            " ".join(str(each.tokens_again) for each in rounds),
            mean,
        ]
        print(f"| `{arm}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
