"""Logging in vLLM's processes: the format of the other processes, also for uvicorn's lines."""

LOG_CONFIG = "atropos-logging.json"  # the file that VLLM_LOGGING_CONFIG_PATH names
# Health checks, the bridge's heartbeats and samplers call these several times per second: no access lines.
QUIET_PATHS = ("/health", "/metrics", "/v1/bridge", "/generate")


def logging_config(level: str) -> dict[str, object]:
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
