"""The kinds of work that a stage of stages.py does, each in processes of its own: their commands, limits and results.

Every kind has `commands`, which a test reads without running them, and `run`, which raises Failed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from atropos_launcher.checks.peak_memory import PeakMemory, of_gpus
from atroposlib.clients.one_request import NoReply, request
from benchmarks.gpu.random_model import ROOT, ensure_random_model
from example_trainer.settings.gpus import visible_gpus

PORT = 23040
LOOK_S = 0.25  # between two looks at the GPU's memory
PLAN_LIMIT_S = 60
COPIED_BYTES = 20 << 20  # of a run's file: a larger one stays where it is
COLUMNS = (
    "policy_version reward_mean loss grad_norm logprob_diff_mean logprob_diff_max sampler_kl completion_tokens"
    " generate_s train_s step_s sync_stall_s sync_transfer_s sync_apply_s sync_bytes bit_exact/differing_tokens"
    " bit_exact/tokens bit_exact/max_abs_diff accuracy"
).split()
SHORT = (  # of a rehearsal
    *("--trainer.batch-size", "2", "--trainer.gradient-accumulation-steps", "1", "--env.group_size", "2"),
    *("--env.max_new_tokens", "8"),
)
# random weights learn nothing, and every answer is worth nothing
RANDOM = ("--trainer.entropy-coef", "0.01", "--env.steps_per_eval", "0", "--env.eval_at_start", "false")
SMOLLM2 = "smollm2"  # the quickstart's model, instead of a random one
Found = dict[str, Any]


class Failed(Exception):
    """Is raised with why a stage did not pass, and with what it found all the same."""

    def __init__(self, why: str, found: Found) -> None:
        super().__init__(why)
        self.found = found


@dataclass(frozen=True)
class Site:
    """Describes where stages run."""

    work: Path  # of models, runs, logs and caches
    rehearse: bool = False  # on a CPU, with a tiny model

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    def folder_of(self, size: str) -> Path:
        """Return the directory of the random model of this size, which may be missing yet."""
        return self.work / "models" / self._size(size)

    def model(self, size: str) -> str:
        """The same directory, made on first use."""
        return str(ensure_random_model(self._size(size), self.work))

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of every process: where models are, and the checkout's modules."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return os.environ | {"WORK": str(self.work), "PYTHONPATH": path} | more

    def _size(self, size: str) -> str:
        return "tiny" if self.rehearse else size


class Work(Protocol):
    """Declares what a stage does."""

    def commands(self, site: Site) -> list[list[str]]: ...

    def run(self, site: Site, limit_s: float) -> Found:
        """Raises Failed."""
        ...


@dataclass(frozen=True)
class Program:
    """A module beside this one; it prints JSON lines behind an @."""

    module: str
    words: tuple[str, ...] = ()

    def commands(self, site: Site) -> list[list[str]]:
        more = ["--rehearse"] if site.rehearse else []
        return [[sys.executable, "-m", f"benchmarks.gpu.{self.module}", *self.words, *more]]

    def run(self, site: Site, limit_s: float) -> Found:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([self.module, *self.words]))[:80]
        return found_by(
            self,
            site,
            name,
            limit_s,
            lambda said: {"found": [json.loads(line[1:]) for line in said.splitlines() if line.startswith("@{")]},
        )


@dataclass(frozen=True)
class Training:
    """A run of the launcher by a recipe; what its metrics and its log say."""

    recipe: str
    size: str
    flags: tuple[str, ...] = ()
    digest: bool = False  # whether the run must show that every word of the weights arrived
    exact: bool = False  # whether no token may differ
    steps: int = 3

    @property
    def label(self) -> str:
        return f"{self.recipe}-{self.size}" + ("-exact" if self.exact else "")

    def commands(self, site: Site) -> list[list[str]]:
        is_random = self.size != SMOLLM2
        words = [sys.executable, "-m", "atropos_launcher", "train", self.recipe]
        words += [str(site.folder_of(self.size))] if is_random else []
        words += ["--dataset", "arithmetic"] if self.recipe != "quickstart" else []
        words += ["--steps", str(self.steps), "--run-name", self.label, "--runs", str(site.runs), *self.flags]
        words += [*(SHORT if site.rehearse else ()), *(RANDOM if is_random else ())]
        return [[*words, "--batch-invariant"] if self.exact else words]

    def run(self, site: Site, limit_s: float) -> Found:
        if self.size != SMOLLM2:
            site.model(self.size)
        folder = site.runs / self.label
        shutil.rmtree(folder, ignore_errors=True)
        planned = self._planned(site, *self.commands(site))
        start = time.time()
        found = found_by(self, site, self.label, limit_s, lambda said: self._found(site, folder, said, planned, start))
        if wrong := self.wrong(found["rows"], found["digest"]):
            raise Failed(wrong, found)
        return found

    def _found(self, site: Site, folder: Path, said: str, planned: str, start: float) -> Found:
        self._copy_files(site, folder)
        rows = metrics(folder)
        text = said + "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))
        return {
            "first_step_after_s": round(rows[0]["time"] - start, 1) if rows else None,
            "planned_gb": re.findall(r"in all +([\d.]+ GB of [\d.]+) GB", planned),
            # the trainer must not load while vLLM measures: what vLLM believes is free then shrinks its cache
            "kv_cache": re.findall(r"Available KV cache memory: .*|GPU KV cache size: .*", text),
            "digest": sorted(set(re.findall(r"Digest: .*", text))),
            "parity": re.findall(r"[Pp]arity.*", text)[:4],
            "rows": [{key: row[key] for key in COLUMNS if row.get(key) is not None} for row in rows],
        }

    def wrong(self, rows: list[Found], digests: list[str]) -> str:
        """Explain why a run that ended well does not pass; empty if it does."""
        if len(rows) != self.steps:
            return f"{len(rows)} of {self.steps} steps"
        if self.digest and not any("every word" in line for line in digests):
            return "no digest says that every word arrived"
        if self.exact and any(row.get("bit_exact/differing_tokens") != 0 for row in rows):
            return "tokens differ"
        return ""

    def _planned(self, site: Site, command: list[str]) -> str:
        """Return what a dry run prints: the memory plan, beside which the peak is judged."""
        try:
            plan = subprocess.run(
                [*command, "--dry-run"],
                capture_output=True,
                text=True,
                timeout=PLAN_LIMIT_S,
                cwd=ROOT,
                env=site.environment(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"--dry-run took more than {PLAN_LIMIT_S} s", {}) from error
        (site.logs / f"{self.label}.plan.log").write_text(plan.stdout + plan.stderr)
        return plan.stdout

    def _copy_files(self, site: Site, folder: Path) -> None:
        for path in sorted(path for end in ("log", "jsonl", "yaml") for path in folder.glob(f"*.{end}")):
            if path.stat().st_size < COPIED_BYTES:
                shutil.copy(path, site.logs / f"{self.label}.{path.name}")


@dataclass(frozen=True)
class Together:
    """Several at once, where time is short; their times and peaks of memory are then each other's."""

    parts: tuple[Work, ...]

    def commands(self, site: Site) -> list[list[str]]:
        return [command for part in self.parts for command in part.commands(site)]

    def run(self, site: Site, limit_s: float) -> Found:
        found, wrong = [], []
        with ThreadPoolExecutor(len(self.parts)) as pool:
            running = [pool.submit(part.run, site, limit_s) for part in self.parts]
        for each in running:
            try:
                found.append(each.result())
            except Failed as error:
                wrong.append(str(error))
                found.append(error.found)
        if wrong:
            raise Failed(" | ".join(wrong), {"found": found})
        return {"found": found}


@dataclass(frozen=True)
class Command:
    """A command of the product or its tests, in which MODEL stands for a random model; what it printed last."""

    name: str
    words: tuple[str, ...]
    size: str = "0.6B"

    def commands(self, site: Site) -> list[list[str]]:
        model = str(site.folder_of(self.size))
        return [[sys.executable, *(model if word == "MODEL" else word for word in self.words)]]

    def run(self, site: Site, limit_s: float) -> Found:
        if "MODEL" in self.words:
            site.model(self.size)
        return found_by(self, site, self.name, limit_s, lambda said: {"last": said.strip().splitlines()[-12:]})


@dataclass(frozen=True)
class Generation:
    """Tokens per second of a server, with many requests at once, and of one request alone."""

    size: str
    flags: tuple[str, ...] = ()

    def commands(self, site: Site) -> list[list[str]]:
        words = [sys.executable, "-u", "example_trainer/vllm_api_server.py", "--model", str(site.folder_of(self.size))]
        words += ["--port", str(PORT), "--max-model-len", "1024", "--max-num-seqs", "64"]
        return [[*words, "--gpu-memory-utilization", "0.4", *self.flags]]

    def run(self, site: Site, limit_s: float) -> Found:
        site.model(self.size)
        name = f"generation-{self.size}" + ("-exact" if "--batch-invariant" in self.flags else "")
        log = site.logs / f"{name}.log"
        started = time.monotonic()
        (command,) = self.commands(site)
        server = running_process(site, command, log, grace_s=30, LOGDIR=str(site.logs))
        with PeakMemory(gpu_bytes, LOOK_S) as peak, server as process:
            self._await(process, log, started + limit_s - 30)
            ready_s = round(time.monotonic() - started, 1)
            rates = self._rates(4, 8, limit_s) if site.rehearse else self._rates(64, 256, limit_s)
        return {"ready_s": ready_s, "peak_gpu_gb": round(peak.nbytes / 1e9, 2)} | rates

    def _await(self, process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> None:
        """Until the server answers."""
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(NoReply):  # it does not listen yet
                if request("GET", f"http://127.0.0.1:{PORT}/health", connect_s=5, read_s=5).status == 200:
                    return
            time.sleep(0.5)
        raise Failed(f"no server: {log.read_text(errors='replace').strip()[-500:]}", {})

    def _rates(self, clients: int, tokens: int, timeout_s: float) -> Found:
        def ask(index: int) -> int:
            body = {"prompt": {"prompt_token_ids": list(range(5 + index, 133 + index))}, "max_tokens": tokens}
            body |= {"ignore_eos": True, "temperature": 1.0}
            url = f"http://127.0.0.1:{PORT}/generate"
            reply = request("POST", url, connect_s=5, read_s=timeout_s, body=body)
            if reply.status != 200:
                raise Failed(f"{url} answered {reply.status}: {reply.content[:300].decode(errors='replace')}", {})
            return sum(map(len, msgspec.json.decode(reply.content)["token_ids"]))

        found: Found = {"clients": clients}
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))  # warms up
            for label, count in (("one", 1), ("many", 2 * clients)):
                start = time.monotonic()
                sampled = sum(pool.map(ask, range(count)))
                found[f"tokens_per_s_{label}"] = round(sampled / (time.monotonic() - start), 1)
        return found


def found_by(work: Work, site: Site, name: str, limit_s: float, read: Callable[[str], Found]) -> Found:
    """Return what the one command of `work` took, and what `read` finds in its output. Raises Failed with its last
    lines.
    """
    (command,) = work.commands(site)
    status, said, took = finished(site, name, command, limit_s)
    found = took | read(said)
    if status:
        raise Failed(f"status {status}: {' / '.join(said.strip().splitlines()[-3:])[-600:]}", found)
    return found


def finished(site: Site, name: str, command: list[str], limit_s: float) -> tuple[int, str, Found]:
    """Exit status (124 at its limit), output, and what it took. The log is NAME.log."""
    log = site.logs / f"{name}.log"
    start = time.monotonic()
    with PeakMemory(gpu_bytes, LOOK_S) as peak, running_process(site, command, log) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = 124
    took = {"seconds": round(time.monotonic() - start, 1), "peak_gpu_gb": round(peak.nbytes / 1e9, 2)}
    return status, log.read_text(errors="replace"), took


@contextmanager
def running_process(
    site: Site, command: list[str], log: Path, grace_s: float = 15, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that leads a session and writes into `log`. It and what it started end with the block."""
    with log.open("wb") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=site.environment(**environment),
        )
        try:
            yield process
        finally:
            end(process, grace_s)


def end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """A launcher ends its own services when it is asked to; what remains of its session is killed."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def metrics(run: Path) -> list[Found]:
    """The rows of a run's metrics.jsonl, as far as it came."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@cache
def first_gpu() -> str | None:
    """The GPU that one process takes, by index or UUID; None on a CPU."""
    return next(iter(visible_gpus(os.environ)), None)


def gpu_bytes() -> int:
    """Memory of that GPU that all processes have taken; 0 without one, or where the driver does not tell."""
    name = first_gpu()
    if name is None:
        return 0
    try:
        import pynvml  # takes no process for each look, as nvidia-smi does
    except ImportError:
        return of_gpus([name])
    try:
        pynvml.nvmlInit()
        by = pynvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
        return int(pynvml.nvmlDeviceGetMemoryInfo(by(int(name) if name.isdecimal() else name)).used)
    except pynvml.NVMLError:
        return 0
