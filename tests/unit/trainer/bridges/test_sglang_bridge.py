"""Mode sglang against a server that keeps SGLang's states; tests/integration/test_sglang.py has SGLang's own code."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from example_trainer.bridges import BridgeError, sglang
from example_trainer.bridges.base import WeightBridge
from example_trainer.errors import TrainerError
from example_trainer.loop.served import check_served
from example_trainer.model.loading import load_model
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.bridges.fake_sglang_server import ADMIN, OPEN, FakeSglangServer, serving_sglang

CPU = torch.device("cpu")
UPDATE = "/update_weights_from_distributed"
SYNC = ["/pause_generation", "/begin_weight_update", UPDATE, "/end_weight_update", "/update_weight_version"]
SYNC += ["/continue_generation"]


@pytest.fixture(autouse=True)
def refusals_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "REFUSAL_S", 0.1)


@pytest.fixture
def server(model: str) -> Iterator[FakeSglangServer]:
    with serving_sglang(model, 1) as (only,):
        yield only


def config_to(model: str, *servers: FakeSglangServer, **settings: Any) -> TrainerConfig:
    keys = {"vllm_api_key": OPEN, "sglang_admin_api_key": ADMIN}
    mode = {"model_name": model, "weight_bridge_mode": "sglang", "vllm_port": [server.port for server in servers]}
    short = {"bridge_timeout_s": 2, "vllm_start_timeout": 2, "bridge_bucket_mb": 1}
    return TrainerConfig.model_validate(mode | keys | short | settings)


def bridge_to(model: str, *servers: FakeSglangServer, **settings: Any) -> WeightBridge:
    config = config_to(model, *servers, **settings)
    prepared = sglang.prepare(config, model, CPU)
    try:
        return prepared.connect(TrainedModel(load_model(model, CPU)))
    except BaseException:
        prepared.close()
        raise


def change(bridge: Any) -> None:
    with torch.no_grad():
        for parameter in bridge._trained.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def serves_the_trainers(bridge: Any, server: FakeSglangServer) -> bool:
    served = dict(server.model.named_parameters())
    ours = bridge._trained.model.named_parameters()
    return all(torch.equal(served[name], parameter) for name, parameter in ours)


def test_every_server_serves_the_trainers_words_under_its_version(model: str) -> None:
    with serving_sglang(model, 1, 2) as servers:
        bridge = bridge_to(model, *servers)
        report = bridge.sync(0, lambda: None)
        assert (report.servers, report.transfer_s) == (2, 0.0)
        assert 0 < report.apply_s < report.stall_s
        assert report.bytes_moved == 3 * sum(p.nbytes for p in servers[0].model.parameters())
        for version in (1, 2):
            bridge.sync(version, lambda: change(bridge))
            for server in servers:
                assert serves_the_trainers(bridge, server)
                assert (server.version, server.paused) == (str(version), False)
        assert bridge.parity_probe() < 1e-5
        bridge.close()
        assert servers[1].orders[-1][0] == "/destroy_weights_update_group"


def test_a_sync_keeps_requests_and_drops_the_cache_once(model: str, server: FakeSglangServer) -> None:
    bridge = bridge_to(model, server)
    server.orders.clear()
    bridge.sync(0, lambda: None)
    assert server.taken == [*SYNC[:2], "/weights_checker", *SYNC[2:]]
    server.orders.clear()
    bridge.sync(1, lambda: change(bridge))
    assert server.taken == SYNC
    bodies = dict(server.orders)
    assert bodies["/pause_generation"] == {"mode": "retract"}
    assert bodies["/update_weight_version"] == {"new_version": "1", "abort_all_requests": False}
    flushed = [body["flush_cache"] for path, body in server.orders if path == UPDATE]
    assert flushed == [False] * (len(flushed) - 1) + [True]
    bridge.close()


def test_many_buckets_and_another_dtype_arrive(model: str) -> None:
    server = FakeSglangServer(model, dtype="half")
    bridge = bridge_to(model, server)
    bridge._buckets = bridge._manifest.buckets(1000)  # type: ignore[attr-defined]
    bridge.sync(0, lambda: change(bridge))
    assert sum(path == UPDATE for path, _ in server.orders) > 5
    served = dict(server.model.named_parameters())
    for name, parameter in bridge._trained.model.named_parameters():  # type: ignore[attr-defined]
        assert torch.equal(served[name], parameter.half().float()), name
    bridge.close()
    server.stop()


def test_a_tensor_that_sglang_passes_over_is_seen_although_it_was_right_before(
    model: str, server: FakeSglangServer
) -> None:
    server.ignored = {"model.layers.1.mlp.down_proj.weight"}
    bridge = bridge_to(model, server)
    bridge.sync(0, lambda: None)  # the weights that the server has loaded from the same directory
    with pytest.raises(TrainerError, match="log-probabilities differ"):
        check_served(bridge, 0, config_to(model, server), "torch")
    bridge.close()


@pytest.mark.parametrize(
    ("step", "state"),
    [
        ("/pause_generation", "with its previous weights"),
        ("/begin_weight_update", "with its previous weights"),
        (UPDATE, "with 0 of 1 buckets of new weights"),
        ("/end_weight_update", "not finished"),
        ("/update_weight_version", "new weights under the previous version"),
        ("/continue_generation", "with policy version 1"),
    ],
)
def test_a_step_that_fails_leaves_every_server_paused_and_the_next_trainer_repairs_it(
    model: str, step: str, state: str
) -> None:
    with serving_sglang(model, 1, 1) as (good, bad):
        bridge = bridge_to(model, good, bad, bridge_timeout_s=1)
        bridge.sync(0, lambda: None)
        bad.fails = step
        for server in (good, bad):
            server.orders.clear()
        with pytest.raises(BridgeError) as failed:
            bridge.sync(1, lambda: change(bridge))
        said = str(failed.value)
        assert said.startswith(f"{step} failed: the SGLang server at http://localhost:{bad.port} refused")
        assert state in said
        assert "Start the trainer again" in said
        assert bad.taken[-1] == step
        assert step == "/continue_generation" or "/continue_generation" not in good.taken
        bridge.close()
        again = bridge_to(model, good, bad)
        again.sync(0, lambda: change(again))
        assert not bad.paused
        assert serves_the_trainers(again, bad)
        assert serves_the_trainers(again, good)
        again.close()


def test_a_server_that_dies_in_mid_transfer_is_named_at_the_deadline(model: str, server: FakeSglangServer) -> None:
    bridge = bridge_to(model, server, bridge_timeout_s=1)
    bridge.sync(0, lambda: None)
    server.dies = UPDATE
    with pytest.raises(BridgeError, match=rf"{UPDATE} failed: the SGLang server at .*{server.port} did not answer"):
        bridge.sync(1, lambda: change(bridge))
    assert "/continue_generation" not in server.taken[-2:]
    bridge.close()


def test_what_fails_in_the_trainer_itself_leaves_the_server_as_it_was(model: str, server: FakeSglangServer) -> None:
    bridge = bridge_to(model, server)
    server.orders.clear()

    def update() -> None:
        raise TrainerError("out of memory")

    with pytest.raises(TrainerError, match="out of memory"):
        bridge.sync(0, update)
    assert server.orders == []
    bridge.close()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"dtype": "auto"}, "--dtype auto: start it with --dtype bfloat16"),
        ({"dp_size": 2}, "dp_size 2 and pp_size 1.*one server per replica"),
        ({"pp_size": 2}, "dp_size 1 and pp_size 2"),
    ],
)
def test_a_server_that_cannot_take_weights_is_refused_before_anything_is_touched(
    model: str, server: FakeSglangServer, info: dict[str, Any], message: str
) -> None:
    server.info |= info
    with pytest.raises(BridgeError, match=message):
        bridge_to(model, server)
    assert server.orders == []


def test_servers_of_two_dtypes_are_refused(model: str) -> None:
    with serving_sglang(model, 1, 1) as servers:
        servers[1].info["dtype"] = "bfloat16"
        with pytest.raises(BridgeError, match=r"serve \['bfloat16', 'float32'\]: start all with the same --dtype"):
            bridge_to(model, *servers)


REFUSED: dict[str, tuple[Callable[[FakeSglangServer], Any], dict[str, Any], str]] = {
    "another model": (
        lambda server: server.model_info.update(model_type="qwen3"),
        {},
        "serves a qwen3 model, the trainer trains a llama one",
    ),
    "wrong key": (id, {"vllm_api_key": "wrong"}, r"refused GET /server_info \(401\): Unauthorized"),
    "wrong admin key": (
        id,
        {"sglang_admin_api_key": "wrong"},
        r"refused POST /init_weights_update_group \(401\): Unauthorized",
    ),
    "nobody": (lambda server: server.stop(), {"vllm_start_timeout": 0.1}, "no SGLang server at .* after 0 s"),
    "ranks do not join": (
        lambda server: setattr(server, "_init_weights_update_group", lambda body: (200, {"message": ""})),
        {"bridge_timeout_s": 1},
        r"did not join at 127\.0\.0\.1 within 1 s",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_connected_is_refused_with_what_it_is(model: str, server: FakeSglangServer, name: str) -> None:
    break_it, settings, says = REFUSED[name]
    break_it(server)
    with pytest.raises(BridgeError, match=says):
        bridge_to(model, server, **settings)


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(BridgeError, match=r"does not feed mixtures of experts.*gate_up_proj"):
        sglang.manifest_of({"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8)}, "bfloat16", "m")


def test_exactness_and_several_modes_flags_are_refused(model: str, server: FakeSglangServer) -> None:
    with pytest.raises(ValueError, match="--batch-invariant covers vLLM, not the servers of mode sglang"):
        config_to(model, server, batch_invariant=True)
