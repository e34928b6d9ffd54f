"""The API's requests as pydantic models: what clients of 0.4.0 build with them, the API accepts."""

import pytest
from fastapi.testclient import TestClient

import atroposlib.api.server as server
from atroposlib.api.server import (  # old names
    EnvIdentifier,
    Info,
    RegisterEnv,
    Registration,
    ScoredData,
    Status,
)


def test_a_run_in_requests_of_the_models() -> None:
    trainer = Registration(
        wandb_group="g",
        wandb_project="p",
        batch_size=2,
        max_token_len=64,
        checkpoint_dir="",
        save_checkpoint_interval=-1,
        starting_step=0,
        num_steps=1,
    )
    env = RegisterEnv(max_token_length=64, desired_name="sums", weight=1.0, group_size=2)
    group = ScoredData(tokens=[[1, 2], [1, 3]], masks=[[-100, 2], [-100, 3]], scores=[0.0, 1.0])
    with TestClient(server.create_app(), base_url="http://127.0.0.1") as api:
        assert api.post("/register", json=trainer.model_dump()).status_code == 200
        assert api.get("/batch").json() == {"batch": None}
        joined = api.post("/register-env", json=env.model_dump()).json()
        posted = api.post("/scored_data", json=group.model_copy(update={"env_id": joined["env_id"]}).model_dump())
        assert posted.json() == {"status": "received"}
        assert Status(**api.get("/status").json()).queue_size == 1
        assert Info(**api.get("/info").json()).batch_size == 2
        left = api.post("/disconnect-env", json=EnvIdentifier(env_id=joined["env_id"]).model_dump())
        assert left.json() == {"status": "success"}


def test_the_module_has_no_other_names_than_before() -> None:
    with pytest.raises(AttributeError, match=r"'atroposlib\.api\.server' has no attribute 'Registrations'"):
        server.Registrations  # noqa: B018
