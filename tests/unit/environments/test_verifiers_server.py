"""The verifiers environment over a fake child and a fake server: groups, failures, restarts, hostile output."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from atroposlib.child_processes import lines, verifiers_child
from atroposlib.child_processes.lines import LineChild
from atroposlib.child_processes.pool import ChildFailed
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.errors import DataError, EnvError, NotReplayed, PeerError
from atroposlib.envs.failures import Failure, GroupLost
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from environments.verifiers_server import VerifiersConfig, VerifiersEnv, child_environment, split_tasks
from tests.unit.environments.fake_renderers_server import FakeRenderersServer
from tests.unit.environments.fake_verifiers_child import node, trace
from tests.waiting import until

pytestmark = pytest.mark.services
FAKE = Path(__file__).with_name("fake_verifiers_child.py")


Playing = Callable[..., contextlib.AbstractAsyncContextManager[tuple[VerifiersEnv, FakeRenderersServer]]]


@pytest.fixture
def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Playing:
    """The environment in groups of four, over the fake child and server."""
    monkeypatch.setattr(verifiers_child, "__file__", str(FAKE))
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))

    @contextlib.asynccontextmanager
    async def play(arguments: Any = None, **fields: Any) -> AsyncIterator[tuple[VerifiersEnv, FakeRenderersServer]]:
        told = {"starts": str(tmp_path / "starts"), **(arguments or {})}
        settings: dict[str, Any] = {"group_size": 4, "heldout_size": 2, "use_wandb": False, "max_new_tokens": 16}
        settings |= {"verifiers_python": sys.executable, "tokenizer_name": tokenizer, "startup_timeout": 30.0}
        config = VerifiersConfig(**settings | {"taskset": "fake", "taskset_arguments": told} | fields)
        async with FakeRenderersServer(lambda ids: [9]) as server:
            connection = APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake", api_key="k")
            env = VerifiersEnv(config, [connection])
            async with env._env_run:
                await env.setup()
                yield env, server

    return play


def starts(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("starts") for pid in path.read_text().split()]


def sampled_by(server: FakeRenderersServer, number: int, version: int) -> None:
    server.policy_version = version
    server.note(f"t{number}", [10 + number % 10, 11])


async def test_a_group_has_ids_masks_log_probabilities_rewards_and_policy_versions(playing: Playing) -> None:
    async with playing() as (env, server):
        for number in range(1, 5):
            sampled_by(server, number, number)
        group, later = await env.collect_trajectories(await env.get_next_item())
        metrics = env.rewards
    assert isinstance(group, dict)
    assert later == []
    assert sorted(group["tokens"]) == [[1, 2, 3, 10 + number, 11] for number in range(1, 5)]
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"] or [], strict=True):
        assert masks == [-100, -100, -100, *tokens[3:]]
        assert logprobs == [1.0, 1.0, 1.0, -0.25, -0.25]
    numbers = [tokens[3] - 10 for tokens in group["tokens"]]
    assert group["scores"] == [float(number % 2) for number in numbers]
    assert group["policy_versions"] == [[number, number] for number in numbers]
    assert group["version_spans"] == [[[0, number]] for number in numbers]
    assert group["finish_reasons"] == ["stop"] * 4
    assert group["generation_params"] == {"temperature": 1.0, "top_p": 1.0}
    assert not group.get("failed")
    assert sorted(metrics["right"]) == [0.0, 0.0, 1.0, 1.0]


async def test_a_group_says_the_sampling_that_an_agent_added(playing: Playing) -> None:
    nodes = [node([1, 2], "user"), node([3, 10, 11], "assistant", 2)]
    nodes[1]["sampling"] = {"temperature": 1.0, "top_k": 20}
    arguments = {"fates": [{"traces": [trace(1, nodes=nodes, branches=[[0, 1]])]}] * 4}
    async with playing(arguments) as (env, _):
        group, _ = await env.collect_trajectories(0)
    assert isinstance(group, dict)
    assert group["generation_params"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 20}


async def test_an_episode_of_several_branches_is_one_rollout_and_each_token_is_trained_once(playing: Playing) -> None:
    nodes = [node([1], "user"), node([2, 10, 11], "assistant", 2), node([3], "tool"), node([4, 12], "assistant", 1)]
    nodes += [node([5], "user"), node([6, 13], "assistant", 1)]
    forked = trace(1, nodes=nodes, branches=[[0, 1, 2, 3], [0, 1, 4, 5]])
    arguments = {"fates": [{"traces": [forked]}, "well", "well", "well"]}
    async with playing(arguments) as (env, server):
        for ids, version in (([10, 11], 1), ([12], 2), ([13], 4)):
            server.policy_version = version
            server.note("t1", ids)
        group, _ = await env.collect_trajectories(0)
    assert isinstance(group, dict)
    assert sorted(group["rollouts"] or []) in ([0, 0, 1, 2, 3], [0, 1, 1, 2, 3], [0, 1, 2, 2, 3], [0, 1, 2, 3, 3])
    long = [index for index, tokens in enumerate(group["tokens"]) if tokens[:4] == [1, 2, 10, 11]]
    assert [group["masks"][index] for index in long] == [
        [-100, -100, 10, 11, -100, -100, 12],
        [-100, -100, -100, -100, -100, -100, 13],
    ]
    spans, versions = group["version_spans"], group["policy_versions"]
    assert spans is None  # those of the other rollouts are unknown
    assert versions is None


async def test_versions_of_several_turns_follow_each_other(playing: Playing) -> None:
    nodes = [node([1], "user"), node([2, 10, 11], "assistant", 2), node([3], "tool"), node([4, 12], "assistant", 1)]
    turns = trace(1, nodes=nodes, branches=[[0, 1, 2, 3]])
    async with playing({"fates": [{"traces": [turns]}]}) as (env, server):
        for ids, version in (([10, 11], 1), ([12], 2)):
            server.policy_version = version
            server.note("t1", ids)
        group, _ = await env.collect_trajectories(0)
    assert isinstance(group, dict)
    assert group["version_spans"] == [[[0, 1], [6, 2]]] * 4
    assert group["policy_versions"] == [[1, 2]] * 4


async def test_agents_with_rewards_of_their_own_are_compared_among_themselves(playing: Playing) -> None:
    both = [trace(1, agent="solver"), trace(2, agent="critic"), trace(3, agent="judge", trainable=False)]
    fates = [{"traces": both}, {"traces": both}, {"traces": both}, {"traces": both[:1]}]
    async with playing({"fates": fates}) as (env, _):
        groups, _ = await env.collect_trajectories(0)
    assert isinstance(groups, list)
    assert [(group["scores"], group.get("group_overrides")) for group in groups] == [
        ([1.0] * 4, None),
        ([0.0] * 3, {"group_size": 3}),
    ]


FAILED = [
    ({"ok": False, "errors": [{"type": "ProviderError", "message": "503"}]}, "infrastructure"),
    ({"ok": False, "errors": [{"type": "HarnessError", "message": "killed"}]}, "infrastructure"),
    ({"ok": False, "errors": [{"type": "TaskError", "message": "is_right: KeyError"}]}, "scorer"),
    ({"ok": False, "errors": [{"type": "EnvError", "message": "run()"}]}, "environment"),
    ({"ok": False, "timed_out": True}, "timeout"),
    ({"traces": [trace(1, trainable=False)]}, "infrastructure"),
    ({"traces": [trace(1, reward=float("nan"))]}, "infrastructure"),
    ({"traces": [trace(1, branches=[[0, 9]])]}, "infrastructure"),
    ({"traces": [trace(1, nodes=[node([1, 2], "user", logprobs=[-0.5])])]}, "infrastructure"),
    ({"traces": [trace(1, nodes=[node([-1], "user")])]}, "infrastructure"),
    ({"traces": 7}, "infrastructure"),
    ("refuse", "environment"),
]


@pytest.mark.parametrize(("fate", "cause"), FAILED)
async def test_a_failed_or_malformed_episode_is_a_failed_rollout_and_its_siblings_go_on(
    playing: Playing, tmp_path: Path, fate: Any, cause: str
) -> None:
    fates = ["well", fate, "well", "well"]
    async with playing({"fates": fates}) as (env, _):
        group, _ = await env.collect_trajectories(0)
    assert isinstance(group, dict)
    assert group.get("failed") == {cause: 1}
    assert len(group["scores"]) == 3
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize("fate", ["die", "garble", "scalar", "huge"])
async def test_a_child_that_dies_or_garbles_fails_what_it_played_and_is_started_again(
    playing: Playing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 1 << 16)
    async with playing({"fates": ["well"] * 4 + [fate]}) as (env, _):
        whole, _ = await env.collect_trajectories(0)
        lost = [await env._judged_answer(0)]
        again, _ = await env.collect_trajectories(0)
    assert [isinstance(group, dict) and len(group["scores"]) for group in (whole, again)] == [4, 4]
    assert isinstance(lost[0], Failure)
    assert lost[0].cause == "infrastructure"
    assert "the process of verifiers failed" in str(lost[0])
    first, second = starts(tmp_path)
    assert first != second
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)  # the environment has ended


async def test_a_group_whose_every_episode_dies_with_its_child_is_lost_not_zero(playing: Playing) -> None:
    async with playing({"fates": ["ignore", "ignore", "ignore", "die"]}) as (env, _):
        with pytest.raises(GroupLost, match="4 of its 4 rollouts failed"):
            await env.collect_trajectories(0)


async def test_a_child_that_hangs_is_killed_after_its_silence(
    playing: Playing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "ASKED_EVERY_S", 0.05)
    arguments = {"fates": ["hang"]}
    async with playing(arguments, silence_limit=0.5) as (env, _):
        failed = await asyncio.wait_for(env._judged_answer(0), 20)
        assert not psutil.pid_exists(starts(tmp_path)[0])
    assert isinstance(failed, Failure)
    assert "has not answered for 0.5 s" in str(failed)


async def test_an_episode_that_takes_too_long_has_timed_out_and_the_child_lives(
    playing: Playing, tmp_path: Path
) -> None:
    arguments = {"fates": ["ignore", "well"]}
    async with playing(arguments, rollout_timeout=0.3) as (env, _):
        failed, fine = await env._judged_answer(0), await env._judged_answer(0)
    assert isinstance(failed, Failure)
    assert failed.cause == "timeout"
    assert not isinstance(fine, Failure)
    assert len(starts(tmp_path)) == 1


async def test_what_a_killed_child_had_started_is_killed_with_it(
    playing: Playing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRANDCHILD", str(tmp_path / "grandchild"))
    async with playing({"fates": ["grandchild"]}) as (env, _):
        await env._judged_answer(0)
        left = int((tmp_path / "grandchild").read_text())
        assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("settings", "says", "tries"),
    [
        ({"arguments": {"open": "refuse"}}, "no such taskset", 1),
        ({"arguments": {"open": "die"}}, "exit status 3; its last words: cannot load", 1),
        ({"verifiers_python": "/none"}, r"scripts/verifiers_setup\.sh", 0),
    ],
)
async def test_a_taskset_that_cannot_be_opened_ends_the_environment_with_its_reason(
    playing: Playing, tmp_path: Path, settings: dict[str, Any], says: str, tries: int
) -> None:
    with pytest.raises(EnvError, match=says):
        async with playing(**settings):
            pass
    assert len(starts(tmp_path)) == tries


async def test_a_server_without_the_routes_is_named_with_what_to_start(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRenderersServer, "has_routes", False, raising=False)

    async def missing(self: Any, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"detail": "Not Found"}, status=404)

    monkeypatch.setattr(FakeRenderersServer, "_models", missing)
    with pytest.raises(PeerError, match=r"example_trainer/vllm_api_server\.py"):
        async with playing():
            pass


async def test_an_agent_that_samples_in_a_way_that_is_not_replayed_ends_the_environment(playing: Playing) -> None:
    for sampling, says in (({"temperature": 0.5}, "temperature 0.5 instead of 1.0"), ({"min_p": 0.1}, "min_p 0.1")):
        nodes = [node([1], "user"), node([2], "assistant", 1, sampling=sampling)]
        fates = {"fates": [{"traces": [trace(1, nodes=nodes)]}]}
        async with playing(fates) as (env, _):
            with pytest.raises(NotReplayed, match=says):
                await env.collect_trajectories(0)


async def test_an_evaluation_goes_on_without_the_episodes_that_fail(playing: Playing) -> None:
    arguments = {"fates": ["well", {"ok": False}]}
    async with playing(arguments) as (env, _):
        metrics = await env.evaluate()
    assert {name: metrics[name] for name in ("accuracy", "total", "unscored")} == {
        "accuracy": 1.0,
        "total": 1,
        "unscored": 1,
    }


async def test_each_epoch_has_every_task_to_train_on_in_an_order_of_its_own(playing: Playing) -> None:
    async with playing() as (env, _):
        numbers = [await env.training_item(number) for number in range(12)]
        assert sorted(numbers[:6]) == sorted(numbers[6:]) == env.train_tasks
        assert not set(numbers) & set(env.held_out)
    async with playing({"tasks": None}) as (env, _):
        assert [await env.training_item(number) for number in range(3)] == [2, 3, 4]
        assert env.held_out == [0, 1]


def test_half_is_held_out_at_most_and_a_taskset_has_tasks() -> None:
    train, held_out = split_tasks(8, 64, 0, "t")
    assert train is not None
    assert (len(train), len(held_out)) == (4, 4)
    assert sorted([*train, *held_out]) == list(range(8))
    with pytest.raises(DataError, match="t has no questions"):
        split_tasks(0, 64, 0, "t")


def test_verifiers_gets_no_secret_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_TOKEN", "ATROPOS_API_TOKEN", "JUDGE_API_KEY", "PLAIN", "PYTHONPATH")
    for name in names:
        monkeypatch.setenv(name, "x")
    config = VerifiersConfig(tokenizer_name="t", forward_env=["JUDGE_API_KEY"], verifiers_python="/v/bin/python")
    given = child_environment(config, {"ATROPOS_VLLM_API_KEY_0": "k"})
    assert given.keys() & set(names) == {"JUDGE_API_KEY", "PLAIN"}
    assert given["ATROPOS_VLLM_API_KEY_0"] == "k"
    assert given["PATH"].startswith(f"/v/bin{os.pathsep}")


async def test_a_child_that_is_closed_ends_by_itself_and_is_not_asked_again() -> None:
    program = "import sys; print('ready', file=sys.stderr, flush=True); sys.stdin.read(); open(sys.argv[1], 'w')"
    said: list[str] = []
    child = LineChild(
        [sys.executable, "-c", program, os.devnull], environment=os.environ, silence_limit_s=30, said=said.append
    )
    with pytest.raises(ChildFailed, match="not started"):
        await child.ask("play")
    await child.start()
    await until(lambda: said == ["ready"])
    await child.close(10)
    assert child._process is not None
    assert child._process.returncode == 0
    with pytest.raises(ChildFailed):
        await child.ask("play")


async def test_a_program_that_is_not_there_is_a_failure_with_its_name() -> None:
    child = LineChild(["/nowhere/python"], environment={}, silence_limit_s=30)
    with pytest.raises(ChildFailed, match="/nowhere/python cannot be started"):
        await child.start()


# --- what is wrong is said in the setup, by its first cause -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "needs_more",
            "import no_such_package_at_all",
            "cannot be imported: ModuleNotFoundError: No module named",
        ),
        ("breaks", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("former_env", "def load_environment(**kwargs): ...", "is an environment of verifiers v0"),
    ],
)
def test_a_file_that_is_no_taskset_is_named_with_its_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)  # as `plugin_id` does
    with pytest.raises(verifiers_child.Wrong, match=rf"^{name}\.py {said}"):
        verifiers_child.expect_plugin(f"{name}.py", name)


@pytest.mark.parametrize(("harness", "dialect"), [("codex", "Responses"), ("claude_code", "Anthropic"), ("null", None)])
def test_a_harness_of_another_dialect_is_refused(harness: str, dialect: str | None) -> None:
    env = SimpleNamespace(_harnesses={"solver": SimpleNamespace(config=SimpleNamespace(id=harness))})
    if dialect is None:
        verifiers_child.refuse_other_dialects(env)
        return
    with pytest.raises(verifiers_child.Wrong, match=f"'{harness}' of agent 'solver' speaks the {dialect}"):
        verifiers_child.refuse_other_dialects(env)


async def test_a_taskset_that_broke_says_what_it_raised_first() -> None:
    def tasks() -> Any:
        yield 0
        raise LookupError("the words are missing")

    async with contextlib.AsyncExitStack() as stack:
        player = verifiers_child.Player({}, stack)
        player._rest = tasks()
        for _ in range(3):
            with pytest.raises(LookupError, match="the words are missing"):
                player._load(2)


REPORTS = """
import os, socket, time
def run():
    sock = socket.create_server(("127.0.0.1", 0))
    open(os.environ["MCP_PORT_FILE"], "w").write(str(sock.getsockname()[1]))
    time.sleep(600)
"""
MAIN = 'if __name__ == "__main__":\n    '


def tool_server(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, runtime: str) -> Any:
    """A toolset as verifiers has it, whose module is `text`."""
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    config = SimpleNamespace(runtime=SimpleNamespace(type=runtime), url=None, model_dump_json=lambda: "{}")
    return type("Clock", (), {"__module__": module, "config": config})()


@pytest.mark.services
@pytest.mark.parametrize(
    ("module", "text", "runtime", "said"),
    [
        ("clock_without_main", REPORTS, "subprocess", "starts no server: its module needs `if __name__"),
        ("clock_in_a_box", REPORTS, "docker", "starts no server: its module needs `if __name__"),
        ("clock_breaks", "raise OSError('no licence')", "subprocess", "ends with 1: OSError: no licence"),
        ("clock_hangs", f"import time\n{MAIN}time.sleep(600)", "subprocess", "reports no port within 3 s"),
        ("clock_of_main", f"{REPORTS}\n{MAIN}run()", "subprocess", None),
        ("clock_of_main_in_a_box", f"{REPORTS}\n{MAIN}run()", "docker", None),
    ],
)
async def test_a_tool_server_that_cannot_start_is_found_before_the_first_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, runtime: str, said: str | None
) -> None:
    monkeypatch.setattr(verifiers_child, "TOOLS_START_S", 3.0 if "hangs" in module else 60.0)
    server = tool_server(tmp_path, monkeypatch, module, text, runtime)
    if said is None:
        await verifiers_child.expect_tools([server, server])
        return
    with pytest.raises(verifiers_child.Wrong, match=f"^toolset Clock: `python -m {module}`.* {said}"):
        await verifiers_child.expect_tools([server])


def test_what_a_taskset_raises_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "words.py"
    file.write_text("def load():\n    import json\n    json.loads('{')\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    with pytest.raises(ValueError, match="Expecting") as raised:
        namespace["load"]()
    assert verifiers_child.place_of(raised.value) == f" ({file}:3)"


def test_a_taskset_of_harbor_names_what_installs_it() -> None:
    theirs = type("HarborTaskset", (), {"__module__": "verifiers.v1.tasksets.harbor.taskset"})
    mine = type("Mine", (theirs,), {"__module__": "mine"})
    assert verifiers_child.is_of_harbor(mine)
    assert not verifiers_child.is_of_harbor(int)
    with pytest.raises(verifiers_child.Wrong, match=r"run `scripts/verifiers_setup\.sh harbor`"):
        verifiers_child.expect_harbor(None, {})


@pytest.mark.parametrize(
    ("runtime", "allowed", "at_once", "refused"),
    [
        ("docker", False, 16, False),
        ("subprocess", True, 1, False),
        ("subprocess", True, 2, True),
        ("subprocess", False, 1, True),
    ],
)
def test_harbors_episodes_do_not_meet_in_the_tests_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, runtime: str, allowed: bool, at_once: int, refused: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    env = SimpleNamespace(_agent_specs={"agent": SimpleNamespace(runtime=SimpleNamespace(type=runtime))})
    said = pytest.raises(verifiers_child.Wrong, match="one of each for all episodes") if refused else nullcontext()
    with said:
        verifiers_child.expect_harbor(env, {"allow_host_execution": allowed, "rollouts_at_once": at_once})
