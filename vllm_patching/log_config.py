"""How vLLM's processes log: in the format of the other processes, uvicorn's lines too."""

from typing import Any

LOG_CONFIG = "atropos-logging.json"  # the file whose name stands in VLLM_LOGGING_CONFIG_PATH
# Asked several times a second: by those who look whether vLLM lives, by the bridge's heartbeats, by samplers.
QUIET_PATHS = ("/health", "/metrics", "/v1/bridge", "/generate")


def logging_config(level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`, in each process of vLLM."""
    ours = {"handlers": ["lines"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": "atroposlib.logs.Lines", "process": "vllm"}},
        "filters": {"quiet": {"()": "atroposlib.logs.QuietAccess", "paths": QUIET_PATHS}},
        "handlers": {"lines": {"()": "atroposlib.logs.make_line_handler", "formatter": "lines"}},
        "loggers": {
            "vllm": {**ours, "level": level},
            "uvicorn": {**ours, "level": "INFO"},
            "uvicorn.access": {**ours, "level": "INFO", "filters": ["quiet"]},
        },
        "root": {"handlers": ["lines"], "level": "WARNING"},
    }
