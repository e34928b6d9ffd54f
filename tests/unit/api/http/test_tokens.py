"""Two tokens, the files that hold them, and that none is ever printed."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr, ValidationError

from atroposlib.api.http.auth import OPEN_PATHS, POST_ROUTES
from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from atroposlib.api.token_file import TokenFile, read_token
from atroposlib.config import resolve_config
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.flags import ConfigError
from example_trainer.settings.config import TrainerConfig
from tests.unit.api.support import DEADLINE_S, api_settings, command

TOKEN = "correct-horse-battery"
POST = "only-for-environments"


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- two roles ---------------------------------------------------------------------------------------


def test_the_post_token_opens_what_environments_ask_for_and_nothing_else() -> None:
    client = TestClient(create_app(api_settings(api_token=TOKEN, post_token=POST)))
    routes = client.app.openapi()["paths"]  # type: ignore[attr-defined]
    assert {path for _, path in POST_ROUTES} < set(routes)
    for path, methods in [*routes.items(), ("/docs", ["get"]), ("/nowhere", ["post"])]:
        for method in methods:
            status = client.request(method, path, headers=bearing(POST)).status_code
            is_open = path in OPEN_PATHS or (method.upper(), path) in POST_ROUTES
            assert (status == 403) != is_open, (method, path, status)
            assert client.request(method, path, headers=bearing(TOKEN)).status_code not in (401, 403), path
    reply = client.post("/reset_data", headers=bearing(POST))
    assert "needs the API's token" in reply.json()["detail"]


def test_one_token_for_both_roles_opens_everything() -> None:
    settings = api_settings(api_token=TOKEN).model_copy(
        update={"post_token": SecretStr(TOKEN)}
    )  # files may come to that
    client = TestClient(create_app(settings))
    assert client.get("/batch", headers=bearing(TOKEN)).status_code == 200


def config(*flags: str, **env: str) -> RunApiConfig:
    return resolve_config(RunApiConfig, flags, prog="run-api", env=env)[0]


def test_the_post_token_comes_from_flag_file_or_environment(tmp_path: Path) -> None:
    file = token_file(tmp_path, POST)
    for flags, env in (
        (["--post-token", POST], {}),
        (["--post-token-file", str(file)], {}),
        ([], {"ATROPOS_POST_TOKEN": POST}),
    ):
        assert config(*flags, ATROPOS_API_TOKEN=TOKEN, **env).posters_token == POST


@pytest.mark.parametrize("flags", [["--post-token", POST], ["--post-token", POST, "--api-token", POST]])
def test_a_post_token_alone_or_twice_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="give --api-token too"):
        config(*flags)


# --- files -------------------------------------------------------------------------------------------


def token_file(folder: Path, content: str = TOKEN) -> Path:
    file = folder / "token"
    file.write_text(content + "\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    file = token_file(tmp_path)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"--api-token-file.*others can write.*chmod go-w {re.escape(str(file))}"):
        config("--api-token-file", str(file))


def test_a_file_in_a_folder_that_others_can_write_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    file = token_file(tmp_path / "open")
    (tmp_path / "link").symlink_to(file)
    assert read_token(tmp_path / "link", "--api-token-file") == TOKEN
    for mode, refused in ((0o777, True), (0o775, True), (0o1777, False), (0o755, False)):
        (tmp_path / "open").chmod(mode)
        for path in (file, tmp_path / "link"):
            if refused:
                with pytest.raises(ValueError, match="others can write"):
                    read_token(path, "--api-token-file")
            else:
                assert read_token(path, "--api-token-file") == TOKEN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = token_file(tmp_path)
    os.chown(file, 12345, -1)
    with pytest.raises(ValueError, match="belongs to another user"):
        read_token(file, "--api-token-file")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(ValueError, match=r"not a regular file|Is a directory"):
            read_token(path, "--api-token-file")


def test_a_changed_file_changes_the_token_without_a_restart_and_a_broken_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    file = token_file(tmp_path)
    token = TokenFile(file, "--api-token-file", clock=lambda: now[0])
    token_file(tmp_path, "another-token-now")
    assert token.current() == TOKEN  # it looks once a second at most
    now[0] = 1.5
    assert token.current() == "another-token-now"
    breaks: list[Callable[[], Any]] = [
        lambda: file.write_text("short"),
        lambda: file.chmod(0o666),
        file.unlink,
    ]
    for damage in breaks:
        damage()
        for _ in range(3):
            now[0] += 2
            assert token.current() == "another-token-now"
    lines = [record.getMessage() for record in caplog.records if "token is unchanged" in record.getMessage()]
    assert len(lines) == 3
    assert "short" not in "".join(lines)


def test_a_served_token_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.api.token_file.LOOK_EVERY_S", 0)
    file = token_file(tmp_path)
    client = TestClient(create_app(config("--api-token-file", str(file))))
    assert client.get("/status", headers=bearing(TOKEN)).status_code == 200
    token_file(tmp_path, "another-token-now")
    assert client.get("/status", headers=bearing(TOKEN)).status_code == 401
    assert client.get("/status", headers=bearing("another-token-now")).status_code == 200


# --- never echoed -------------------------------------------------------------------------------------

SECRET = "s3cret"


@pytest.mark.services
@pytest.mark.parametrize("variable", ["ATROPOS_API_TOKEN", "ATROPOS_POST_TOKEN"])
@pytest.mark.parametrize("value", [SECRET, f"{SECRET} with spaces", f"{SECRET}\n{SECRET}", f"{SECRET}-é"])
def test_an_unusable_token_is_one_line_without_the_token(variable: str, value: str) -> None:
    env = os.environ | {"ATROPOS_API_TOKEN": TOKEN, variable: value}
    ended = subprocess.run(command("--port", "0"), capture_output=True, text=True, timeout=DEADLINE_S, env=env)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "8 or more" in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        (RunApiConfig, "ATROPOS_API_TOKEN"),
        (RunApiConfig, "ATROPOS_POST_TOKEN"),
        (TrainerConfig, "ATROPOS_API_TOKEN"),
        (TrainerConfig, "VLLM_API_KEY"),
        (BaseEnvConfig, "ATROPOS_API_TOKEN"),
    ],
)
def test_an_empty_variable_for_a_secret_is_refused(kind: Any, variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is set, but empty"):
        resolve_config(kind, [], prog="test", env={variable: ""})


def test_no_mistake_in_a_yaml_file_shows_a_secret(tmp_path: Path) -> None:
    for content in (f"api_token: '{SECRET}", f"api_token: [{SECRET}]", f"api_token: {{a: {SECRET}}}", f"{SECRET}: : :"):
        (tmp_path / "api.yaml").write_text(content)
        with pytest.raises(ConfigError) as refused:
            config("--config", str(tmp_path / "api.yaml"))
        assert SECRET not in str(refused.value)
    (tmp_path / "env.yaml").write_text(f"rollout_server_token: [{SECRET}]")
    with pytest.raises(ConfigError) as refused:
        resolve_config(BaseEnvConfig, ["--config", str(tmp_path / "env.yaml")], prog="env", env={})
    assert SECRET not in str(refused.value)


def test_an_error_in_python_shows_no_secret() -> None:
    with pytest.raises(ValidationError) as refused:
        RunApiConfig(api_token=SecretStr(SECRET))
    assert SECRET not in str(refused.value)
    with pytest.raises(ValidationError) as refused:
        RunApiConfig(api_token=[SECRET])
    assert SECRET not in str(refused.value)
