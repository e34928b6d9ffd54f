"""What each environment server last reported of itself, for GET /activity and /metrics."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from atroposlib.wire.batching import EnvReport

MAX_REGISTERED = 1024  # whose reports are kept; each may take 46 KB, and 16 lines of /metrics
MAX_UNREGISTERED = 64
UNREGISTERED_S = 30.0  # after which one that is not heard of any more is forgotten


class Reports:
    """The last report of each registered environment, of many those that were heard last; and of servers that still
    wait for something. `clock` is in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._registered: OrderedDict[int, EnvReport] = OrderedDict()  # in both the one heard last is last
        self._unregistered: OrderedDict[str, tuple[EnvReport, float]] = OrderedDict()

    def note(self, env_id: int | None, report: EnvReport) -> None:
        """Keep a report in place of the previous one."""
        self._unregistered.pop(report.process, None)
        if env_id is not None:
            self._registered[env_id] = report
            self._registered.move_to_end(env_id)
            if len(self._registered) > MAX_REGISTERED:
                self._registered.popitem(last=False)
            return
        self._unregistered[report.process] = report, self._clock()
        if len(self._unregistered) > MAX_UNREGISTERED:
            self._unregistered.popitem(last=False)

    @property
    def registered(self) -> Mapping[int, EnvReport]:
        """By env_id."""
        return self._registered

    def unregistered(self) -> Iterator[tuple[EnvReport, float]]:
        """Iterate over unregistered environments heard of lately, and how many seconds ago."""
        now = self._clock()
        return ((report, now - at) for report, at in self._unregistered.values() if now - at <= UNREGISTERED_S)

    def forget(self, env_id: int) -> None:
        """The environment is not known any more."""
        self._registered.pop(env_id, None)

    def clear(self) -> None:
        """Forget everyone."""
        self._registered.clear()
        self._unregistered.clear()
