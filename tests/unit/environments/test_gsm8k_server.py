import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer
from environments.gsm8k_server import GSM8kEnv, GSM8kEnvConfig
from tests.unit.envs.fakes import Trainer, running_api
from tests.waiting import until

pytestmark = [pytest.mark.services, pytest.mark.timeout(120)]
SCRIPT = Path(__file__).parents[3] / "environments" / "gsm8k_server.py"


def solve(prompt: str) -> str:
    """Right for sums, wrong for products."""
    found = re.findall(r"(\d) ([+*]) (\d)", prompt)
    a, _operator, b = found[-1]
    return f"The answer is {int(a) + int(b)}."


@contextlib.asynccontextmanager
async def running_env(folder: Path, server: FakeInferenceServer, **fields: object) -> AsyncIterator[GSM8kEnv]:
    settings = {
        "group_size": 4,
        "dataset": "arithmetic",
        "tokenizer_name": str(save_tiny_tokenizer(folder / "tok")),
        "use_wandb": False,
    }
    config = GSM8kEnvConfig(**settings | fields)
    env = GSM8kEnv(config, [APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
    async with env._env_run:
        await env.setup()
        yield env


async def test_group_carries_what_was_sampled(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: ["5", "6", "It is 5.", "none"], policy_version=3) as server,
        running_env(tmp_path, server) as env,
    ):
        item = next(problem for problem in env.problems.train if problem.result == "5")
        group, backlog = await env.collect_trajectories(item)
    assert group is not None
    assert backlog == []
    assert group["scores"] == [1.0, 0.0, 1.0, 0.0]
    assert Counter(scored.outcome for scored in env.scored) == {"right": 2, "wrong": 1, "unparseable": 1}
    assert (group["policy_versions"], group["version_spans"]) == ([[3, 3]] * 4, [[[0, 3]]] * 4)
    assert group["generation_params"] == {"temperature": 1.0, "top_p": 1.0}
    tokenizer = make_tiny_tokenizer()
    prompt = f"<|im_start|>user\n{item.question}<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(tokens) for tokens in group["tokens"][:2]] == [
        f"{prompt}5<|im_end|>",
        f"{prompt}6<|im_end|>",
    ]
    sampled = [[token for token in mask if token != -100] for mask in group["masks"]]
    assert [tokenizer.decode(tokens) for tokens in sampled] == [
        "5<|im_end|>",
        "6<|im_end|>",
        "It is 5.<|im_end|>",
        "none<|im_end|>",
    ]
    assert group["inference_logprobs"] is not None
    for mask, logprobs in zip(group["masks"], group["inference_logprobs"], strict=True):
        assert [logprob == 1.0 for logprob in logprobs] == [token == -100 for token in mask]
    body = server.requests[0][1]
    assert (body["n"], body["max_tokens"], body["temperature"]) == (4, 24, 1.0)


async def test_boxed_style_asks_for_and_reads_the_box(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"question": f"q{n}", "answer": "#### 1,250"}) + "\n" for n in range(4))
    )
    answers = [r"So \boxed{1250}, not 7.", r"\boxed{\frac{2500}{2}}", "1250", r"\boxed{1251}"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(tmp_path, server, dataset_path=str(tmp_path / "p.jsonl"), heldout_size=2) as env,
    ):
        assert [message["role"] for message in env.prompt(env.problems.train[0])] == ["system", "user"]
        group, _ = await env.collect_trajectories(env.problems.train[0])
    assert group is not None
    assert group["scores"] == [1.0, 1.0, 0.0, 0.0]
    assert [scored.outcome for scored in env.scored].count("unparseable") == 1


async def test_answers_on_which_the_grader_failed_are_counted_and_three_of_four_lose_the_group(
    tmp_path: Path,
) -> None:
    answers = ["1", *[r"\boxed{9^{9^{9^{9^9}}}}"] * 3]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(tmp_path, server, prompt_style="boxed", grader_timeout=0.3, max_new_tokens=64) as env,
    ):
        await env.handle_env(env.problems.train[0])
    counts = {"groups_dropped_by_grader": 1, "items_without_group": 1, "rollouts_failed_scorer": 3}
    assert env._env_run.counts == counts
    assert {scored.outcome for scored in env.scored} == {"unparseable", "grader_failed"}


async def test_evaluation_is_greedy_over_the_held_out_problems(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(solve) as server,
        running_env(tmp_path, server, data_dir_to_save_evals=str(tmp_path / "evals")) as env,
    ):
        metrics = await env.evaluate()
        held_out = env.problems.held_out
    right = sum("+" in problem.question or problem.question == "What is 2 * 2?" for problem in held_out)
    assert metrics["correct"] == right
    assert metrics["total"] == 64
    assert metrics["accuracy"] == right / 64
    assert all(body["temperature"] == 0.0 and body["n"] == 1 for path, body in server.requests)
    samples = [json.loads(line) for line in (tmp_path / "evals/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 64
    assert samples[0]["question"] == held_out[0].question


async def test_unreachable_hub_falls_back_in_one_line_or_fails_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeInferenceServer() as server:
        async with running_env(tmp_path, server, dataset="auto", hub_timeout=0.2) as env:
            assert len(env.problems.train) == 324
            assert not env.boxed
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1
        assert warnings[0].startswith(
            "Using the built-in arithmetic problems instead of GSM8K: the hub did not deliver"
        )
        with pytest.raises(RuntimeError, match="the hub did not deliver openai/gsm8k within 0 s"):
            async with running_env(tmp_path, server, dataset="gsm8k", hub_timeout=0.2):
                pass


# --- as people run it -----------------------------------------------------------------------------------------------


async def start(*arguments: str, cwd: Path) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, cwd=cwd, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )


async def test_whole_run_of_the_script(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "model")
    flags = [
        "--env.dataset",
        "arithmetic",
        "--env.group_size",
        "4",
        "--env.steps_per_eval",
        "2",
        "--env.eval_at_start",
        "--env.use_wandb",
        "false",
    ]
    flags += ["--env.max_batches_offpolicy", "0", "--env.ensure_scores_are_not_same", "false"]
    flags += ["--env.data_path_to_save_groups", "samples.jsonl", "--env.evaluations_path", "evaluations.jsonl"]
    async with running_api() as api, FakeInferenceServer(solve, model_name=str(tokenizer)) as server:
        process = await start(
            *flags, "--env.rollout_server_url", api.url, "--openai.base_url", server.base_url, cwd=tmp_path
        )
        trainer = Trainer(api.url, batch_size=16, num_steps=3)
        await trainer.register()
        await trainer.joined()
        await trainer.evaluation(0)
        await trainer.train(3)
        output, _ = await asyncio.wait_for(process.communicate(), 20)
    log = output.decode()
    assert process.returncode == 0, log
    accuracies = [json.loads(line)["accuracy"] for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert len(accuracies) == 3
    assert trainer.accuracies[3] == accuracies[2] > 0.3
    assert f"{server.base_url} serves {tokenizer}" in log
    assert re.search(r"Held-out accuracy \d+\.\d % \(\d+/64\) at policy version 3 \(greedy, \d+\.\d s\)", log)
    assert re.search(r"Step \d: \d+ answers, \d+ right, \d+ wrong, \d+ unparseable, 0 grader failed", log)
    assert "Traceback" not in log
    groups = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(groups) == 12
    assert {len(group["scores"]) for group in groups} == {4}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_it_within_five_seconds_and_it_says_goodbye(tmp_path: Path, number: signal.Signals) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "model")
    async with running_api() as api, FakeInferenceServer(solve, model_name=str(tokenizer)) as server:
        server.delay_s = 60
        flags = [
            "--env.rollout_server_url",
            api.url,
            "--openai.base_url",
            server.base_url,
            "--env.dataset",
            "arithmetic",
        ]
        process = await start(*flags, cwd=tmp_path)
        trainer = Trainer(api.url)
        await trainer.register()
        await until(lambda: server.in_flight > 0)
        begun = time.monotonic()
        os.kill(process.pid, number)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        took_s = time.monotonic() - begun
    assert took_s < 5 + 5  # its own limit, and what a busy machine needs to end a process
    assert process.returncode == 128 + number
    assert "Disconnected from" in output.decode()
    assert "Traceback" not in output.decode()


async def test_waiting_for_the_inference_server_is_said_and_bounded(tmp_path: Path) -> None:
    process = await start("--openai.base_url", "http://127.0.0.1:9/v1", "--env.startup_timeout", "1", cwd=tmp_path)
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert (
        "Waiting for the name of the served model from http://127.0.0.1:9/v1/models, 0 s of at most 1 s so far"
        in output.decode()
    )
    assert "ERROR" in output.decode()
    assert "start the inference server, correct --openai.base_url" in output.decode()


async def test_process_writes_groups_and_a_page(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "model")
    async with FakeInferenceServer(solve, model_name=str(tokenizer)) as server:
        flags = ["--env.dataset", "arithmetic", "--env.total_steps", "3", "--openai.base_url", server.base_url]
        process = await start("process", *flags, cwd=tmp_path)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    groups = [json.loads(line) for line in (tmp_path / "data/gsm8k.jsonl").read_text().splitlines()]
    assert len(groups) == 3
    assert len(groups[0]["messages"]) == 4
    assert (tmp_path / "data/gsm8k.html").read_text().count("<summary>Group ") == 3


async def test_evaluate_keeps_results_and_configuration_without_the_key(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "model")
    async with FakeInferenceServer(solve, model_name=str(tokenizer), api_key="topsecret") as server:
        flags = ["--env.dataset", "arithmetic", "--openai.base_url", server.base_url, "--openai.api_key", "topsecret"]
        process = await start("evaluate", *flags, "--env.data_dir_to_save_evals", "evals", cwd=tmp_path)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]["total"] == 64
    assert "topsecret" not in (tmp_path / "evals/evaluate_config.yaml").read_text()
