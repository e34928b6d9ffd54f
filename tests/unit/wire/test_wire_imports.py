import subprocess
import sys

import pytest

PROGRAM = """
import sys
import {module}
heavy = ("fastapi", "starlette", "numpy", "pydantic", "aiohttp", "requests", "httpx", "torch", "vllm", "uvicorn")
loaded = sorted(name for name in (*heavy, "atroposlib.api.server") if name in sys.modules)
assert not loaded, loaded
"""


@pytest.mark.services
@pytest.mark.parametrize(
    "module", ["atroposlib.wire.batching", "atroposlib.wire.bridge", "atroposlib.wire.routes", "atroposlib.api"]
)
def test_import_loads_neither_a_framework_nor_an_app(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
