"""The fake inference server as a process of its own; as a library it carries the other tests of this directory."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from atroposlib.testing.fake_inference_server import FakeInferenceServer


@pytest.mark.services
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_from_the_command_line_until_it_is_ended_and_leaves_nothing(
    tmp_path: Path, ending: signal.Signals
) -> None:
    command = [
        sys.executable,
        "-m",
        "atroposlib.testing.fake_inference_server",
        "--port",
        "0",
        "--answer",
        "The answer is 4.",
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "listens on" in line)
        url = line.split("listens on ")[1].split()[0]
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 50}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"] == "The answer is 4."
    finally:
        process.send_signal(ending)
        assert process.wait(10) == 0
        process.stderr.close()
    assert list(tmp_path.glob("fake-inference-*")) == []


@pytest.mark.services
def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "atroposlib.testing.fake_inference_server", "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert f"cannot listen on 127.0.0.1:{port}" in last_line
    assert last_line.endswith("choose another --port")


async def test_a_client_of_openai_reads_a_chat_as_a_stream() -> None:
    async with FakeInferenceServer(lambda prompt: ["one", "two"]) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none")
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Count."}], n=2, stream=True
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert [(each.index, each.delta.content, each.finish_reason) for each in choices] == [
        (0, "one", "stop"),
        (1, "two", "stop"),
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0
