"""Defaults, tolerance and secrecy of the server configuration."""

import pytest
from pydantic import ValidationError

from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManagerConfig


def test_defaults_are_those_environments_were_written_for() -> None:
    assert ServerBaseline().model_dump() == {
        "timeout": 1200,
        "num_max_requests_at_once": 512,
        "num_requests_for_eval": 64,
        "model_name": "default",
        "rolling_buffer_length": 1000,
        "server_type": "openai",
        "tokenizer_name": "none",
    }
    assert APIServerConfig().model_dump() == ServerBaseline().model_dump() | {
        "api_key": "",
        "api_key_env": "",
        "base_url": "",
        "n_kwarg_is_ignored": False,
        "health_check": True,
    }
    assert ServerManagerConfig().model_dump() == {
        "slurm": False,
        "testing": False,
        "max_n_completions": 8,
        "proxy_url": None,
    }


def test_the_api_key_is_neither_printed_nor_written() -> None:
    config = APIServerConfig(api_key="secret")
    assert "secret" not in repr(config) + config.model_dump_json()
    assert config.model_dump()["api_key"] == "secret"


def test_the_variable_that_holds_a_key_is_written_and_not_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    config = APIServerConfig(api_key_env="MY_KEY")
    assert config.key == "secret"
    assert "secret" not in repr(config) + str(config.model_dump()) + config.model_dump_json()
    assert APIServerConfig(api_key="given", api_key_env="MY_KEY").key == "given"


def test_an_unknown_key_is_ignored_with_a_warning_that_names_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    config = APIServerConfig.model_validate({"modelname": "m"})
    assert config.model_name == "default"
    assert "ignores the unknown key 'modelname'; did you mean 'model_name'?" in caplog.text


def test_an_unset_key_or_address_counts_as_empty() -> None:
    config = APIServerConfig.model_validate({"api_key": None, "base_url": None})
    assert (config.api_key, config.base_url) == ("", "")


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0}, {"num_max_requests_at_once": 0}, {"server_type": "vlm"}, {"base_url": "localhost/v1"}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        APIServerConfig.model_validate(wrong)


@pytest.mark.parametrize("address", ["localhost:9001/v1", "10.0.0.7:9001", "node-7.cluster:9001/v1"])
def test_an_address_with_a_port_and_without_a_scheme_is_http(address: str) -> None:
    assert APIServerConfig(base_url=address).base_url == f"http://{address}"


@pytest.mark.parametrize("address", ["api.example.com/v1", "key@host:9001/v1", "ftp://host:21/v1", "host:/v1"])
def test_no_key_is_sent_to_a_guessed_address(address: str) -> None:
    with pytest.raises(ValidationError, match="must start with http:// or https://"):
        APIServerConfig(base_url=address)


def test_a_url_with_a_password_is_refused_for_logs_name_it() -> None:
    with pytest.raises(ValidationError, match="base_url has a password"):
        APIServerConfig(base_url="http://me:hunter2@localhost:9001/v1")
    assert APIServerConfig(base_url="http://localhost:9001/v1/@me").base_url.endswith("@me")


def test_the_tokenizer_is_the_models_unless_named() -> None:
    assert APIServerConfig(model_name="m").tokenizer_id == "m"
    assert APIServerConfig(model_name="m", tokenizer_name="t").tokenizer_id == "t"


def test_naming_an_effort_or_a_budget_enables_reasoning() -> None:
    assert not ReasoningConfig().enabled
    assert ReasoningConfig(effort="low").enabled
    assert ReasoningConfig(max_tokens=2048).enabled
    positional = ReasoningConfig(True, "high", 2048)
    assert (positional.enabled, positional.effort, positional.max_tokens) == (True, "high", 2048)


def test_disabled_reasoning_changes_no_request() -> None:
    assert ReasoningConfig().chat_arguments({"max_tokens": 5}, "http://x/v1") == {"max_tokens": 5}


def test_openai_reasoning_has_its_own_names_and_temperature_1() -> None:
    asked = ReasoningConfig(enabled=True).chat_arguments(
        {"max_tokens": 5, "temperature": 0.2}, "https://api.openai.com/v1"
    )
    assert asked == {"max_completion_tokens": 5, "temperature": 1.0, "extra_body": {"reasoning_effort": "medium"}}


def test_elsewhere_effort_wins_over_a_budget_and_the_callers_body_stays() -> None:
    config = ReasoningConfig(effort="high", max_tokens=2048)
    asked = config.chat_arguments({"extra_body": {"top_k": 3}}, "http://x/v1")
    assert asked == {"extra_body": {"reasoning": {"enabled": True, "effort": "high"}, "top_k": 3}}
    budget = ReasoningConfig(max_tokens=2048).chat_arguments({}, "http://x/v1")
    assert budget == {"extra_body": {"reasoning": {"enabled": True, "max_tokens": 2048}}}
