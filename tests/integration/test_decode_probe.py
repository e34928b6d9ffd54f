"""What vLLM decodes is what was trained: each fault that is planted in a real server is found at the first sync after
it, by the check that the message names, and without a fault none is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.bridges import WeightBridge, make_bridge
from example_trainer.errors import TrainerError
from example_trainer.loop.decoded import DecodeProof
from example_trainer.loop.learner import Learner
from example_trainer.loop.opening import connected
from example_trainer.loop.served import check_served, compared_dtypes
from example_trainer.quickstart_model import cached_model
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from tests.integration.conftest import API_KEY, Server, start_server, stop_server

pytestmark = [pytest.mark.services, pytest.mark.slow]

PLANTED = Path(__file__).with_name("planted")
LR = 4e-5  # the quickstart's
BEYOND_ROUNDING = 3e-4  # moves the tiny model further than bfloat16 rounds its answers


@dataclass
class Planting:
    """A server in which faults can be planted, by name; an empty name is none."""

    server: Server
    state: Path

    def plant(self, fault: str) -> None:
        self.state.write_text(fault)


def planting(model: Path, folder: Path, *flags: str) -> Iterator[Planting]:
    package = folder / "plugins" / "atropos_planted_faults-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: atropos_planted_faults\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = atropos_planted_faults:register\n")
    state = folder / "planted"
    state.write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{package.parent}:{PLANTED}")
        patched.setenv("ATROPOS_PLANTED", str(state))
        server = start_server(model, folder, *flags)
    try:
        yield Planting(server, state)
    finally:
        stop_server(server)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def whole(
    request: pytest.FixtureRequest, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planting]:
    """Of a tiny model in float32; of a real one in bfloat16, whose rounding depends on the model."""
    folder = tmp_path_factory.mktemp("planted")
    model = llama_folder if request.param == "float32" else cached_model()
    yield from planting(model, folder, "--dtype", request.param)


@pytest.fixture(scope="module")
def coarse(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planting]:
    """The tiny model in bfloat16, where one update is larger than rounding."""
    yield from planting(llama_folder, tmp_path_factory.mktemp("planted_coarse"), "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def adapters(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planting]:
    yield from planting(llama_folder, tmp_path_factory.mktemp("planted_lora"), "--enable-lora")


class Trainer:
    """A real learner on a real bridge, whose updates follow the sign of a gradient, as Adam's first ones do."""

    def __init__(self, learner: Learner, bridge: WeightBridge) -> None:
        self.learner, self.bridge, self.version, self.lr = learner, bridge, 0, LR
        learner.begin("", bridge.served_dtype)
        self.dtypes = compared_dtypes(bridge, learner.config, learner.progress.kernels)
        self.proof = DecodeProof(learner, self.dtypes, None, exact=False)
        bridge.sync(0, lambda: None)
        self.prove()

    def step(self) -> None:
        self.version += 1
        self.bridge.sync(self.version, self.update)
        self.prove()

    def prove(self) -> None:
        check_served(self.bridge, self.version, self.learner.config, self.learner.progress.kernels)
        self.proof.begin(self.bridge.decoders(), self.version)
        self.proof.expect()

    def update(self) -> None:
        model = self.learner.trained.model
        ids = torch.arange(1, 201).view(2, -1)[:, : 50 + self.version]
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(self.lr * parameter.grad.sign())
                    parameter.grad = None


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Makes a trainer of a server; it leaves at the end."""
    opened = []

    def start(at: Server, **settings: Any) -> Trainer:
        of_server: dict[str, Any] = {"model_name": at.model, "vllm_port": at.port, "vllm_api_key": API_KEY}
        config = TrainerConfig(**of_server, save_path=tmp_path, **settings)
        learner = Learner(config, torch.device("cpu"), ALONE)
        context = connected(learner, make_bridge(config), at.model)
        bridge = context.__enter__()
        opened.append(context)
        return Trainer(learner, bridge)

    yield start
    for context in opened:
        context.__exit__(None, None, None)


APART = "Decode probe of policy version 2 .* root mean square"
NOT_MOVED = "Decode probe of policy version 2 .* have not moved as the trainer's did"
FAULTS = {
    "head row": "of the tensors .*(lm_head|embed_tokens)",
    "stale cache": f"{APART}|128 tokens of the prompts were in the server's prefix cache",
    "norm": "of the tensors .*layers.1.input_layernorm",
    "rotary": f"{APART}|{NOT_MOVED}",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_the_run_at_the_first_sync(
    fault: str, whole: Planting, train: Callable[..., Trainer]
) -> None:
    expect_found(whole, fault, FAULTS[fault], train)


@pytest.mark.parametrize("whole", ["float32"], indirect=True)
def test_decoding_with_the_weights_of_the_version_before_stops_the_run(
    whole: Planting, train: Callable[..., Trainer]
) -> None:
    expect_found(whole, "decode version before", APART, train)


@pytest.mark.nightly
def test_decoding_with_the_weights_of_the_version_before_stops_a_run_of_bfloat16(
    coarse: Planting, train: Callable[..., Trainer]
) -> None:
    """By the move that did not come: the distributions are closer than rounding explains."""
    expect_found(coarse, "decode version before", NOT_MOVED, train, lr=BEYOND_ROUNDING)


@pytest.mark.parametrize("whole", ["float32"], indirect=True)
def test_a_wrong_row_of_the_heads_product_is_seen_though_the_weights_are_right(
    whole: Planting, train: Callable[..., Trainer]
) -> None:
    expect_found(whole, "row of the head's product", APART, train)


def expect_found(whole: Planting, fault: str, says: str, train: Callable[..., Trainer], lr: float = LR) -> None:
    whole.plant("")
    trainer = train(whole.server, weight_bridge_mode="shared_vllm", use_shared_memory=True)
    trainer.lr = lr
    trainer.step()
    whole.plant(fault)
    with pytest.raises(TrainerError, match=says):
        trainer.step()
    whole.plant("")


@pytest.mark.nightly
def test_an_adapter_of_the_version_before_stops_the_run(adapters: Planting, train: Callable[..., Trainer]) -> None:
    trainer = train(adapters.server, weight_bridge_mode="lora_only", lora_r=8)
    trainer.step()
    trainer.step()
    adapters.plant("adapter version before")
    with pytest.raises(TrainerError, match="Decode probe of policy version 3"):
        trainer.step()


@pytest.mark.parametrize("whole", ["float32"], indirect=True)
def test_prompts_in_the_cache_are_a_fault_if_they_are_the_runs_own_alone(
    whole: Planting, train: Callable[..., Trainer]
) -> None:
    """Anyone may send the same prompts, and would otherwise stop a run by them."""
    whole.plant("")
    trainer = train(whole.server, weight_bridge_mode="shared_vllm", use_shared_memory=True)
    trainer.version += 1
    trainer.bridge.sync(trainer.version, trainer.update)
    for prompt in trainer.proof._probe(512).prompts:
        whole.server.generate(prompt, max_tokens=1)
    trainer.prove()
    with pytest.raises(TrainerError, match="128 tokens of the prompts were in the server's prefix cache"):
        trainer.prove()


@pytest.mark.rotating
def test_sixty_syncs_without_a_fault_raise_no_alarm(whole: Planting, train: Callable[..., Trainer]) -> None:
    whole.plant("")
    trainer = train(whole.server, weight_bridge_mode="shared_vllm", use_shared_memory=True)
    for _ in range(60):
        trainer.step()
