"""The live load as a suite holds it: start it, say what is done to the cluster, stop it and get the report.

    load = LiveLoad(plan)
    load.start()                       300 people are online and talk
    with load.step("scale up"):        what follows belongs to this step, in the report
        …
    load.excuse("10.231.0.12", "node2 was lost")     connections to there may break from now, until `excuse_ends`
    report = load.stop(rows)           they fall silent, everything settles, the checker reads all

The workers are processes of their own, so that the suite may block as it likes. They end with this process, since their
input ends.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.live import history
from e2e.live.plan import Plan
from e2e.live.report import Excuse, Mark, Report, make_report
from tests.faults import checker, looking

ROOT: Final = Path(__file__).resolve().parents[2]
ANSWER_S: Final = 180.0


class LoadError(Exception):
    """The load itself does not work: a worker died or does not answer. Says which and why."""


class LiveLoad:
    """One run. Not to be started twice."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.marks: list[Mark] = []
        self.excuses: list[Excuse] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._records = history.Records()
        self._tails: dict[int, history.Tail] = {}

    def start(self) -> None:
        """Starts the workers, waits until everybody is online, lets them talk. Raises LoadError."""
        (self.plan.folder / "stores").mkdir(parents=True, exist_ok=True)
        plan = self.plan.folder / "plan.json"
        plan.write_text(self.plan.dumps(), encoding="utf-8")
        for number in range(self.plan.workers):
            with (self.plan.folder / f"worker-{number}.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "e2e.live.worker", str(plan), str(number)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        cwd=ROOT,
                        text=True,
                    )
                )
        answers = self._order({"do": "enter"})
        online = sum(answer["online"] for answer in answers)
        if online < self.plan.users:
            off = {user: state for answer in answers for user, state in answer["off"].items()}
            self.kill()
            raise LoadError(
                f"{self.plan.users - online} of {self.plan.users} clients did not come online, such as {off}"
            )
        self.mark("start")
        self._order({"do": "talk"})

    def mark(self, name: str) -> None:
        """What happens from now on belongs to `name`, in the report."""
        self.marks.append(Mark(name, time.monotonic()))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A mark around a block; afterwards things belong to "after <name>"."""
        self.mark(name)
        try:
            yield
        finally:
            self.mark(f"after {name}")

    def excuse(self, host: str, why: str) -> Excuse:
        """Connections to this host ("10.231.0.12" or with ":8900") may break from now on, until `.ends()`."""
        made = Excuse(host, why, time.monotonic())
        self.excuses.append(made)
        return made

    def so_far(self) -> history.Records:
        """What the workers have written down by now, up to a quarter of a second ago. Reads only what is new."""
        for number in range(self.plan.workers):
            self._tails.setdefault(number, history.Tail(self.plan.history(number))).read(self._records)
        return self._records

    def check_alive(self) -> None:
        """Raises LoadError if a worker has died."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                log = self.plan.folder / f"worker-{number}.log"
                tail = log.read_text(encoding="utf-8", errors="replace")[-2_000:]
                raise LoadError(f"worker {number} ended with code {process.returncode}: {tail}")

    def stop(self, read_rows: Callable[[], Sequence[checker.Row]]) -> Report:
        """Falls silent, waits until all is settled and shown, closes the clients, checks everything. Raises LoadError."""
        self.mark("silence")
        self._order({"do": "hush"})
        wanted: Counter[str] = Counter()
        for spoken in self.so_far().spoken.values():
            if not spoken.refused:
                wanted.update((spoken.user, spoken.to))
        self._order({"do": "hear", "n": dict(wanted)})
        self._order({"do": "leave"})
        self.end()
        users = [self.plan.user(n) for n in range(self.plan.users)]
        stored = {user: looking.stored(self.plan.store(user)) for user in users}
        return make_report(self.plan, self.so_far(), read_rows(), stored, self.marks, self.excuses, time.monotonic())

    def end(self) -> None:
        """Ends the workers in order."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes = []

    def kill(self) -> None:
        """Ends them at once; nothing is reported. Without effect after `stop`."""
        for process in self._processes:
            process.kill()
        self.end()

    def _order(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Gives the order to all workers, then collects their answers."""
        self.check_alive()
        text = json.dumps(order) + "\n"
        with selectors.DefaultSelector() as answers:
            for process in self._processes:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(text)
                process.stdin.flush()
                answers.register(process.stdout, selectors.EVENT_READ)
            found: list[dict[str, Any]] = []
            end = time.monotonic() + ANSWER_S
            while len(found) < len(self._processes):
                ready = answers.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise LoadError(f"no answer to {order['do']!r} within {ANSWER_S:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]  # what we registered are streams
                    if not line:
                        self.check_alive()
                        raise LoadError(f"a worker closed its output at {order['do']!r}")
                    found.append(json.loads(line))
                    answers.unregister(key.fileobj)
        return found
