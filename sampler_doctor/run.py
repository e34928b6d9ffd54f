"""From flags to rows: opens server and reference, runs each check, and again after an update.

Called by `__main__`, and by tests.
"""

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from atroposlib.extras import installed_version
from atroposlib.processes.exit_words import exit_words
from atroposlib.processes.groups import KILL_S, Group, end_groups
from sampler_doctor.reference import Reference, Words, digest, directory_of, log_softmax
from sampler_doctor.report import Row
from sampler_doctor.rows.catalogue import CHECKS, LORA, LORA_WORDS, NAMES, STALE, STALE_WORDS, Check
from sampler_doctor.rows.policy import stale_cache
from sampler_doctor.rows.session import ANSWER, LONG, Found, Session, finest_dtype, gap
from sampler_doctor.servers.find import open_sampler
from sampler_doctor.servers.sampler import Ask, Broken, CannotTest, NotOffered, NotShown, Sampler
from sampler_doctor.settings import SamplerConfig

COMMAND_S = 600.0
GRACE_S = 2.0  # for the command, from TERM to KILL
NO_LIMIT = 2048  # tokens of a sequence where neither server nor model says how many


@dataclass
class Doctor:
    """One run of the doctor. Raises CannotTest where no row can run."""

    config: SamplerConfig

    def __post_init__(self) -> None:
        config = self.config
        unknown = [name for name in config.rows if name not in NAMES]
        if unknown:
            raise CannotTest(f"--rows {unknown[0]} is no check; there are: {', '.join(NAMES)}")
        self._served = self._directory = directory_of(config.model)
        if config.after is None:
            self._updated()  # the server is to read it; a command may be what makes it
        self._words = Words(self._directory)
        self.reference = Reference(self._directory)
        self.sampler: Sampler = open_sampler(
            config.sampler,
            config.api_key.get_secret_value() if config.api_key else None,
            config.answer_s,
            protocol=config.protocol,
            model=config.served_name,
            names=self._words.names,
            vocabulary=self.reference.vocabulary,
        )
        try:
            self._session = self._new_session()
        except Broken as error:
            raise CannotTest(f"{config.sampler}: {error}") from None
        self.dtype = config.sampler_dtype
        if self.dtype == "auto":
            try:
                self._session.dtype = finest_dtype(self._session)
            except (NotOffered, NotShown, Broken) as error:
                raise CannotTest(f"{config.sampler} cannot be tested against {config.model}: {error}") from None

    def versions(self) -> dict[str, object]:
        """Return what the receipt says about server, model and this program."""
        return {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "server": self.sampler.version(),
            "protocol": self.sampler.protocol,
            "model": self.config.model,
            "digest": digest(self._directory),
            "dtype": f"{self._session.dtype}, {'inferred' if self.dtype == 'auto' else 'as said'}",
            "log-probabilities a position": self.sampler.top,
            **{name: installed_version(name) or "not installed" for name in ("atroposlib", "torch", "transformers")},
            "python": platform.python_version(),
        }

    def rows(self) -> Iterator[Row]:
        """Run every chosen check; once more after an update."""
        yield from self._pass("")
        if self.config.after is None and self.config.update is None:
            return
        warmed = self._session.prompt(LONG)
        try:
            self._session.greedy(warmed, ANSWER)
            how = self._update()
            before = self.reference
            if self.config.update is not None:
                self._served = self._updated()
                self.reference = Reference(self._served)
        except (NotOffered, Broken) as error:
            yield Row("update", "not offered", str(error), "", "", "")
            return
        except CannotTest as error:  # the rows before it are told all the same
            yield Row("update", "fails", str(error), "", "no row shows the server after it", "correct it; test again")
            return
        dtype = self._session.dtype
        self._session = self._new_session()
        self._session.dtype = dtype
        moved = gap((log_softmax(self.reference.after(warmed)) - log_softmax(before.after(warmed))).tolist())
        del before
        if self._chosen(STALE):
            yield _row(
                Check(STALE, lambda session: stale_cache(session, warmed, moved), *STALE_WORDS), self._session, how
            )
        yield from self._pass(how)

    def _pass(self, after: str) -> Iterator[Row]:
        for check in CHECKS:
            if self._chosen(check.name, quick=check.quick):
                yield _row(check, self._session, after)
        if self.config.adapter is not None and self._chosen(LORA):
            yield _row(Check(LORA, self._lora, *LORA_WORDS), self._session, after)

    def _chosen(self, name: str, *, quick: bool = True) -> bool:
        return name in self.config.rows if self.config.rows else quick or not self.config.quick

    def _new_session(self) -> Session:
        longest = self.sampler.longest() or self.reference.positions or NO_LIMIT
        dtype = "float32" if self.config.sampler_dtype == "auto" else self.config.sampler_dtype
        return Session(self.sampler, self.reference, self._words, longest, dtype)

    def _updated(self) -> Path:
        """Return the directory of what the server serves after the update. Raises CannotTest."""
        return self._directory if self.config.update is None else directory_of(self.config.update, "--update")

    def _update(self) -> str:
        """Update the server, and return how. Raises NotOffered, Broken, and CannotTest for a command that fails."""
        if self.config.after is None:
            return self.sampler.load(str(self._updated().resolve()))
        command = self.config.after
        print(f"Running --after, for at most {COMMAND_S:.0f} s: {command}", file=sys.stderr, flush=True)
        with subprocess.Popen(command, shell=True, start_new_session=True) as running:
            group = Group.of(running.pid)
            try:
                status = running.wait(COMMAND_S)
            except BaseException as error:  # Ctrl-C does not reach a session of its own
                end_groups([group], GRACE_S, KILL_S)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise CannotTest(f"--after {command}: it was ended after {COMMAND_S:.0f} s") from None
        if status:
            raise CannotTest(f"--after {command}: {exit_words(status)}")
        return command

    def _lora(self, session: Session) -> Found:
        """The served adapter against the merged one."""
        name, _, directory = str(self.config.adapter).partition("=")
        merged = Reference(self._served, adapter=directory)
        with_adapter = Session(session.sampler, merged, session.words, session.longest, session.dtype)
        prompts = session.prompts
        changes = gap(
            value
            for prompt in prompts
            for value in (log_softmax(merged.after(prompt)) - log_softmax(session.reference.after(prompt))).tolist()
        )
        if changes.rms <= 2 * session.limit():
            raise NotShown(f"the adapter changes log-probabilities by {changes.rms:.2g} nats, as rounding does")
        answers = session.at_once([Ask(prompt, ANSWER, 0.0, session.few, model=name) for prompt in prompts])
        pairs = zip(prompts, answers, strict=True)
        served = gap(value for prompt, answer in pairs for value in with_adapter.against_reference(prompt, answer))
        return with_adapter.judge(served, f"; the adapter changes {changes.rms:.2g}")


def _row(check: Check, session: Session, after: str) -> Row:
    started = time.perf_counter()
    found = _found(partial(check.run, session))
    seconds = round(time.perf_counter() - started, 3)
    return Row(check.name, found.result, found.figure, found.limit, check.means, check.remedy, after, seconds)


def _found(act: Callable[[], Found]) -> Found:
    try:
        return act()
    except NotOffered as error:
        return Found("not offered", str(error))
    except NotShown as error:
        return Found("not shown", str(error))
    except Broken as error:
        return Found("fails", str(error), "an answer")
