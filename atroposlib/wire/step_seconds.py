"""The columns of metrics.jsonl that tell where the seconds of a trainer's step went, and the four activities that pages
and Prometheus show of them.
"""

import msgspec

ACTIVITIES = ("waiting", "training", "syncing", "evaluating")  # in their order within a step


class StepSeconds(msgspec.Struct, kw_only=True):
    """Holds a step's seconds. `step_s` is fetch to sync, and has `generate_s` and `train_s` in it."""

    step_s: float | None = None
    generate_s: float | None = None
    train_s: float | None = None
    eval_wait_s: float | None = None

    def by_activity(self) -> dict[str, float]:
        """Split the step's seconds: the sync is what waiting and training leave of it."""
        waiting, training = self.generate_s or 0.0, self.train_s or 0.0
        spent = (waiting, training, (self.step_s or 0.0) - waiting - training, self.eval_wait_s or 0.0)
        return {activity: max(0.0, each) for activity, each in zip(ACTIVITIES, spent, strict=True)}
