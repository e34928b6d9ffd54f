"""The log format of vLLM's server, where vLLM itself would give uvicorn another."""

from argparse import Namespace
from typing import Any

import pytest

from vllm_patching import log_config


@pytest.mark.services  # importing vLLM looks at the processor by a process
@pytest.mark.parametrize("ours", [True, False])
def test_uvicorn_is_given_no_file_that_lacks_its_formatters(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 takes VLLM_LOGGING_CONFIG_PATH as the default of --log-config-file, and that file for uvicorn's."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.cli import serve

    from vllm_patching.compat import vllm_server

    started: list[tuple[Any, dict[str, Any]]] = []

    async def run_server(args: Any, **settings: Any) -> None:
        started.append((args, settings))

    monkeypatch.setattr(serve, "run_server", run_server)
    path = f"/run/{log_config.LOG_CONFIG}" if ours else "/home/me/mine.json"
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", path)
    vllm_server.serve(Namespace(log_config_file=path))
    ((args, settings),) = started
    assert args.log_config_file == (None if ours else path)
    assert ("log_config" in settings) is ours
