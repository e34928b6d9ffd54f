"""Explains why no batch comes, from what the batching API reports about its peers (`Activity`).

    trainer, launcher ── GET /activity ──▶ API ◀── heartbeats with reports ── environments

`explain` is pure. Its first line names what is missing; each environment has its own line.
"""

from atroposlib.wire.batching import Activity, EnvActivity, EnvReport

SHOWN = 8  # environments
POLL_S = 10.0  # a trainer that waits asks for its batch more often
SILENT_S = 16.0  # three heartbeats of an environment or trainer are missing: what it said last may not hold any more
EQUAL_SCORES = "all scores equal"
GRADER_FAILED = "the grader failed"
CODE_FAILED = "the environment's code failed"
SERVER_FAILED = "the inference server failed"
ROLLOUTS_FAILED = "too many rollouts failed"
TEACHER_FAILED = "the teacher failed"
# What to do about the reason that most groups of an environment were dropped for.
_ADVICE = {
    EQUAL_SCORES: "every answer of a group scores the same, so there is nothing to learn: look at the answers, make the"
    " task easier or harder, or raise --env.group_size",
    GRADER_FAILED: "look for the grader's warnings in the environment's log",
    CODE_FAILED: "look for the traceback in the environment's log",
    ROLLOUTS_FAILED: "look for its warnings about rollouts in its log; --env.rollout_timeout limits the time of one",
    SERVER_FAILED: "look at the inference server's log",
    TEACHER_FAILED: "look at the teacher's log, and for its errors in the environment's log",
}


def explain(activity: Activity) -> list[str]:
    """Explain what keeps the next batch from coming, most important first."""
    lines = [_head(activity)]
    if activity.journal_error is not None:
        lines.append(f"the API takes no groups: {activity.journal_error}")
    if activity.queue_full:
        lines.append("the API's queue is full: it refuses groups until the trainer takes some")
    shown = activity.environments[:SHOWN]
    heard = {_kind(each): each.name for each in activity.environments if each.connected and each.heard_s is not None}
    lines += [_environment(each, heard.get(_kind(each))) for each in shown]
    more = len(activity.environments) - len(shown) + activity.more_environments
    if more:
        lines.append(f"and {more} more environments")
    return lines


def is_training(activity: Activity) -> bool:
    """Return whether the trainer is busy with its batch, and what follows that: nothing is missing."""
    return activity.trainer and activity.asked_s is not None and activity.asked_s > POLL_S


def is_silent(activity: Activity) -> bool:
    """Return whether the trainer has missed heartbeats; ours sends one every 5 s, also while it trains."""
    return activity.trainer and activity.trainer_heard_s is not None and activity.trainer_heard_s > SILENT_S


def _head(activity: Activity) -> str:
    heard_s, asked_s = activity.trainer_heard_s, activity.asked_s
    if not activity.trainer:
        return "no trainer has registered: it loads its model or waits for vLLM (see its log), or was not started"
    if heard_s is None and (asked_s is None or asked_s > POLL_S):
        return "the trainer has been silent for a long time: see its log"
    if asked_s is None:
        return "the trainer has registered but not yet asked for a batch"
    if is_silent(activity):
        return (
            f"the trainer (step {activity.current_step} of {activity.num_steps}) has been silent for {heard_s:.0f} s:"
            " it is stopped or hangs, or sends no heartbeats while it trains (see its log)"
        )
    if is_training(activity) and activity.trained_steps == activity.current_step:
        return (
            f"the trainer has done step {activity.current_step} of {activity.num_steps} but not yet asked for the "
            "next batch: it waits for an evaluation, or writes a checkpoint (see its log)"
        )
    if is_training(activity):
        return (
            f"the trainer has worked on a batch (step {activity.current_step} of {activity.num_steps}) for "
            f"{asked_s:.0f} s"
        )
    there = _batch(activity)
    if activity.obstacle is not None:
        return f"{there}, but {activity.obstacle}"
    if not any(each.env_id is not None and each.connected for each in activity.environments):
        return f"{there}; no environment is registered: {_not_registered(activity)}"
    return there


def _not_registered(activity: Activity) -> str:
    if any(each.env_id is None for each in activity.environments):
        return "the started ones are not ready"
    if activity.environments:
        return "the earlier ones have ended; start one again"
    return "start one, or see its log"


def _batch(activity: Activity) -> str:
    """`3 of 8 groups of the next batch have arrived`, or in rollouts where the sizes of groups differ."""
    sizes = {each.group_size for each in activity.environments if each.env_id is not None and each.connected}
    if len(sizes) == 1 and (size := sizes.pop()) > 0 and activity.batch_size % size == 0:
        return f"{activity.waiting // size} of {activity.batch_size // size} groups of the next batch have arrived"
    return f"{activity.waiting} of {activity.batch_size} rollouts of the next batch have arrived"


def _kind(environment: EnvActivity) -> str:
    """Return the name that the environment asked for, to which the API adds a number."""
    return environment.name.rpartition("_")[0]


def _environment(environment: EnvActivity, namesake: str | None) -> str:
    name, report = f"environment {environment.name}", environment.report
    if not environment.connected:
        return f"{name} has disconnected"
    if environment.heard_s is None:
        remedy = "see its log, or start it again" if namesake is None else f"{namesake} may have taken its place"
        return f"{name} has been silent for a long time: {remedy}"
    heard = f"{name} (heard {environment.heard_s:.0f} s ago)"
    if report is None:
        return f"{heard} sends no reports"
    if environment.heard_s > SILENT_S:
        return (
            f"{name} has been silent for {environment.heard_s:.0f} s: it is stopped or hangs, or its own code"
            " holds it up (see its log)"
        )
    if environment.env_id is None:
        heard += ", not yet registered,"
    parts = [_state(report)]
    if report.posted:
        thrown = f", {report.thrown_away} sampled and thrown away" if report.thrown_away else ""
        parts.append(f"{report.posted} groups posted{thrown}")
    if report.failed:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.failed.items(), key=_largest))
        parts.append(f"{sum(report.failed.values())} rollouts failed ({causes})")
    if report.dropped:
        parts.append(_dropped(report))
    return f"{heard} {'; '.join(parts)}"


def _state(report: EnvReport) -> str:
    if report.waits_for:
        return f"waits for {report.waits_for}, for {report.waited_s:.0f} s"
    return f"samples {report.in_flight} groups" if report.in_flight else "samples nothing"


def _largest(counted: tuple[str, int]) -> int:
    return -counted[1]


def _dropped(report: EnvReport) -> str:
    ranked = sorted(report.dropped.items(), key=_largest)
    counts = ", ".join(f"{count} {reason}" for reason, count in ranked)
    last = f" (the last: {report.last_drop})" if report.last_drop else ""
    advice = _ADVICE.get(ranked[0][0])
    since = "since the last one that was posted" if report.posted else "so far"
    return f"dropped {since}: {counts}{last}" + (f"; {advice}" if advice else "")
