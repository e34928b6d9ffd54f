"""What a comparison is: arms that do the same work, ours first, and the goals that its page names."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Arm:
    """A command that prints metrics (`metering.py`)."""

    name: str
    command: list[str]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """Our `metric` shall be `factor` times as good as the peer's; less is better where `less` is set."""

    metric: str
    ours: str
    peer: str
    factor: float
    less: bool = False

    def reached(self, ours: float, peer: float) -> float:
        """How many times as good ours is."""
        return peer / ours if self.less else ours / peer


@dataclass(frozen=True)
class Work:
    """Where a comparison may write, the model's directory, and the number of the run, which is its seed."""

    folder: Path
    model: Path
    run: int

    def linked_model(self) -> Path:
        """Put the model at `folder/model`, where arms look for it."""
        link = self.folder / "model"
        if not link.exists():
            link.symlink_to(self.model.resolve())
        return link


@dataclass(frozen=True)
class Comparison:
    """`arms` prepares the work, and holds what must run beside the arms; `packages` are the peer's, with versions."""

    packages: tuple[str, ...]
    arms: Callable[[Work], AbstractContextManager[list[Arm]]]
    goals: tuple[Goal, ...] = ()
