"""Why a worker cannot serve its model, in a file beside the bridge's configuration.

    worker, before it ends ──write──▶ vllm_bridge_config.json.refused ──take──▶ the server's last line

vLLM tells its API process only that an engine process has ended.
"""

from pathlib import Path

from atroposlib.files import write_whole


def write(config_path: Path, why: str) -> None:
    """Called by a worker; several ranks may, for the same reason."""
    write_whole(_file(config_path), why.encode())


def take(config_path: Path) -> str | None:
    """Return and remove what was written since the last call, if anything."""
    file = _file(config_path)
    why = file.read_text() if file.is_file() else None
    file.unlink(missing_ok=True)
    return why


def _file(config_path: Path) -> Path:
    return config_path.with_name(f"{config_path.name}.refused")
