"""--deterministic: what the trainer, vLLM and the environments of a run are told."""

import pytest

from atropos_launcher.plan.sections import expect_filled_batches
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import no_processes, plan  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("no_processes")


def test_every_program_is_told_and_the_exact_mode_comes_along() -> None:
    planned = plan("arithmetic", "--deterministic")
    trainer, env = planned.trainer, planned.environments["env"].resolved["env"]
    assert (trainer.deterministic, trainer.batch_invariant, trainer.bit_exact) == (True, True, "strict")
    assert not trainer.overlap
    assert (env["deterministic"], env["max_batches_offpolicy"], env["min_batch_allocation"]) == (True, 0, None)
    (vllm,) = [service for service in planned.services if service.name == "vllm"]
    assert "--batch-invariant" in vllm.command


def test_several_environments_share_each_batch_evenly() -> None:
    planned = plan("arithmetic", "--deterministic", "--env.count", "2")
    environments = [each.resolved["env"] for each in planned.environments.values()]
    assert [each["min_batch_allocation"] for each in environments] == [0.5, 0.5]
    assert len({each["wandb_name"] for each in environments}) == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--batch-invariant", "false"], "deterministic needs batch_invariant"),
        (["--trainer.deterministic", "false"], "`deterministic` at the top of the run decides it"),
        (["--trainer.overlap", "true"], "--overlap adds up the gradients"),
        (["--env.min_batch_allocation", "0.5"], "whole groups give 32 of a batch's 64 rollouts"),
        (["--env.count", "3"], "whole groups give 48 of a batch's 64 rollouts"),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_anything_starts(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planned_and_filled(*flags)


@pytest.mark.parametrize("environment", ["agent", "openenv", "verifiers"])
def test_an_environment_whose_programs_are_not_ours_is_refused_in_one_line(
    environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan(environment, "--deterministic")
    said = capsys.readouterr().err
    assert f"deterministic: {environment} does not give the same groups again" in said
    assert len(said.strip().splitlines()) == 1


def planned_and_filled(*flags: str) -> None:
    planned = plan("arithmetic", "--deterministic", *flags)
    expect_filled_batches(planned.run, planned.trainer, planned.environments)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--env.max_batches_offpolicy", "2"], "max_batches_offpolicy 2"),
        (["--env.repeat_share", "0.5"], "repeat_share"),
    ],
)
def test_an_environment_refuses_what_it_cannot_repeat(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan("arithmetic", "--deterministic", *flags)
    assert told in capsys.readouterr().err
