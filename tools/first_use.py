"""Uses Plato as a newcomer would: clone, `make up`, two chats, msg stopped and started, Ctrl-C.

Clones this tree's HEAD into a temporary folder, installs it there (that time does not count: it is the downloads), then does
what README.md says, with a data folder and ports of its own. Exit code 0 when every step held. Ends what it started by pid.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, TypeVar

ROOT = Path(__file__).resolve().parent.parent
UP_WITHIN_S: Final = 60
ARRIVES_WITHIN_S: Final = 20
NOTHING_FOR_S: Final = 3.0
ENDS_WITHIN_S: Final = 30

_T = TypeVar("_T")


class FirstUseError(Exception):
    """A step did not hold; says which and what was seen."""


class Program:
    """A child with its own process group, whose output is kept as it comes."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.name = shlex.join(command)
        self.lines: list[str] = []
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PLATO_", "MAKE", "MFLAGS", "PYTHONPATH"))}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # closed under our hands: the program was ended
            for line in output:
                self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        """All that it printed."""
        return "\n".join(self.lines)

    def type(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """Ends it, whatever it takes."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(ENDS_WITHIN_S)
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class FirstUse:
    """The steps, in order. Each says what it saw."""

    def __init__(self, base: Path, keep: Callable[[Program], Program]) -> None:
        self.base = base
        self.copy = base / "plato"
        self.data = base / "data"
        self.plato = str(self.copy / ".venv" / "bin" / "plato")
        self._keep = keep
        self._up: Program
        self._chats: dict[str, Program] = {}
        self._chat_lines: dict[str, list[str]] = {}
        self._conn_ids: dict[str, int] = {}
        self.offset = _free_offset()

    def install(self) -> str:
        """A clone in an empty folder, and `make setup`."""
        _call(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(self.copy)], self.base)
        _call(["make", "setup"], self.copy)
        return _call(["git", "log", "-1", "--format=%h %s"], self.copy)

    def up(self) -> str:
        """`make up` prints how to chat."""
        began = time.monotonic()
        arguments = f"--data-dir {self.data} --port-offset {self.offset}"
        self._up = self._keep(Program(["make", "up", f"ARGS={arguments}"], self.copy))
        _until(lambda: self._printed() or self._up.process.poll() is not None, UP_WITHIN_S, "how to chat", self._up)
        if self._up.process.poll() is not None:
            raise FirstUseError(f"make up ended with code {self._up.process.returncode}:\n{self._up.output}")
        return f"after {time.monotonic() - began:.1f} s"

    def _printed(self) -> bool:
        found = [line.strip() for line in self._up.lines if re.search(r"plato chat \w+ --to \w+", line)]
        self._chat_lines = {shlex.split(line)[2]: shlex.split(line) for line in found}
        return len(self._chat_lines) == 2 and self._up.output.rstrip().endswith("stay.")

    def again(self) -> str:
        """A second `make up` in the same folder says that it is running."""
        code, said = _run(["make", "up", f"ARGS=--data-dir {self.data} --port-offset {self.offset}"], self.copy)
        if code == 0 or "already running" not in said:
            raise FirstUseError(f"a second `make up` ended with code {code} and said: {said}")
        return said.strip().splitlines()[0]

    def chats(self) -> str:
        """The two printed commands, on different gateways and different shards."""
        users = list(self._chat_lines)
        where: dict[str, tuple[str, str]] = {}
        for attempt in range(8):
            for user in users if attempt == 0 else users[1:]:
                extra = ["--plain", "--device", f"n{attempt}"]
                self._chats[user] = self._keep(Program([*self._chat_lines[user], *extra], self.copy))
                where[user] = self._place(user)
            if all(one != other for one, other in zip(*where.values(), strict=True)):
                return ", ".join(f"{user} at {gateway} and {shard}" for user, (gateway, shard) in where.items())
            self._chats[users[1]].end()
        raise FirstUseError(f"eight times on the same gateway or shard: {where}")

    def _place(self, user: str) -> tuple[str, str]:
        """(gateway, shard) of a user's newest route, as the store has it."""
        after = self._conn_ids.get(user, 0)
        code = f"from tools.first_use import place; print(*place({str(self.data)!r}, {user!r}, {after}))"
        program = self._chats[user]

        def ask() -> list[str]:
            ended, said = _run([str(self.copy / ".venv/bin/python"), "-c", code], self.copy)
            return said.split() if ended == 0 else []

        found = _until(ask, ARRIVES_WITHIN_S, f"a route of {user}", program)
        self._conn_ids[user] = int(found[2])
        return found[0], found[1]

    def talk(self) -> str:
        """A message each way."""
        return self._exchange("hello")

    def _exchange(self, words: str) -> str:
        began = time.monotonic()
        for sender, reader in self._pairs():
            self._chats[sender].type(f"{words} from {sender}")
            self._arrives(reader, f"{words} from {sender}")
        return f"both ways in {time.monotonic() - began:.2f} s"

    def _pairs(self) -> list[tuple[str, str]]:
        one, other = self._chats
        return [(one, other), (other, one)]

    def _arrives(self, reader: str, words: str) -> None:
        program = self._chats[reader]
        _until(lambda: words in program.output, ARRIVES_WITHIN_S, f"{words!r} at {reader}", program)

    def without_msg(self) -> str:
        """With msg stopped nothing arrives; with it back everything does, once and in order."""
        _call([self.plato, "stop", "msg", "--data-dir", str(self.data)], self.copy)
        words = [f"while msg is away {n}" for n in range(3)]
        for sender, _ in self._pairs():
            for said in words:
                self._chats[sender].type(f"{said} from {sender}")
        time.sleep(NOTHING_FOR_S)  # the one thing that no condition can tell: that nothing comes
        for sender, reader in self._pairs():
            if any(f"{w} from {sender}" in self._chats[reader].output for w in words):
                raise FirstUseError(f"{reader} got a message while msg was stopped:\n{self._chats[reader].output}")
        _call([self.plato, "start", "msg", "--data-dir", str(self.data)], self.copy)
        for sender, reader in self._pairs():
            for said in words:
                self._arrives(reader, f"{said} from {sender}")
            seen = re.findall(rf"while msg is away (\d) from {sender}", self._chats[reader].output)
            if seen != ["0", "1", "2"]:
                raise FirstUseError(f"{reader} was shown {seen}")
        return self._exchange("back")

    def status(self) -> str:
        """`plato status` says that everything serves."""
        deadline = time.monotonic() + ARRIVES_WITHIN_S
        while True:
            code, said = _run([self.plato, "status", "--data-dir", str(self.data)], self.copy)
            if code == 0:
                return f"{len(said.splitlines())} lines"
            if time.monotonic() > deadline:
                raise FirstUseError(f"plato status ended with code {code}:\n{said}")
            time.sleep(0.2)

    def ctrl_c(self) -> str:
        """Ctrl-C ends the chats and the cluster, and leaves no process."""
        for program in [*self._chats.values(), self._up]:
            program.interrupt()
            try:
                program.process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise FirstUseError(f"{program.name} did not end:\n{program.output[-2000:]}") from None
        _until(lambda: not self._left(), ENDS_WITHIN_S, f"the end of {self._left()}", self._up)
        return "no process is left"

    def _left(self) -> list[str]:
        """Processes that still work on our data folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    if str(self.data) in words:
                        found.append(f"{entry.name} {words}")
        return found


def place(data_dir: str, user: str, after: int) -> tuple[str, str, int]:
    """(gateway, shard, conn_id) of the user's newest route beyond conn_id `after`, read from the running cluster's store.

    Raises LookupError while there is none.
    """
    import asyncio

    from plato.adapters.valkey import ValkeyStore
    from plato.core.ids import slot_of, worker_id_of
    from plato.local.cluster import LocalCluster
    from plato.topology.record import loads

    async def conn_ids() -> list[int]:
        store = await ValkeyStore.connect(cluster.store_url, cluster.settings.store.key_prefix)
        try:
            return [route.conn_id for route in (await store.routes.read_many([user]))[0].values()]
        finally:
            await store.close()

    cluster = LocalCluster(Path(data_dir))
    newest = max(asyncio.run(conn_ids()), default=0)
    topology = loads(cluster.folder.topology.read_text(encoding="utf-8"))
    gateway = topology.gateway_by_worker_id(worker_id_of(newest))
    if newest <= after or gateway is None:
        raise LookupError(f"{user} has no new route")
    return gateway[0], topology.owner(slot_of(newest)).shard, newest


def _free_offset() -> int:
    """An offset at which the embedded cluster's ports (8900 to 8938) are free now."""
    for offset in range(2_000 + os.getpid() % 500 * 40, 50_000, 40):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(8900 + offset, 8939 + offset):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return offset
    raise FirstUseError("no 39 ports in a row are free")


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PLATO_", "MAKE", "MFLAGS", "PYTHONPATH"))}
    run = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout


def _call(command: Sequence[str], folder: Path) -> str:
    code, said = _run(command, folder)
    if code:
        raise FirstUseError(f"{shlex.join(command)} ended with code {code}:\n{said}")
    return said.strip()


def _until(condition: Callable[[], _T], within_s: float, what: str, program: Program) -> _T:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise FirstUseError(f"{what}: not within {within_s} s. {program.name} printed:\n{program.output[-3000:]}")
        time.sleep(0.02)
    return value


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base", type=Path, default=None, help="folder to work in (default: a temporary one)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time-out must not leave a cluster behind
    programs: list[Program] = []

    def keep(program: Program) -> Program:
        programs.append(program)
        return program

    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="plato-first-use-", dir=options.base) as folder:
        Path(folder).chmod(0o755)  # PostgreSQL may run as another user
        try:
            use = FirstUse(Path(folder), keep)
            steps = [use.install, use.up, use.again, use.chats, use.talk, use.without_msg, use.status, use.ctrl_c]
            for step in steps:
                print(f"first use: {(step.__doc__ or '').split(chr(10))[0]}", flush=True)
                print(f"           {step()}", flush=True)
                passed += 1
        except FirstUseError as e:
            failed = 1
            print(f"first use: FAILED: {e}")
        finally:
            for program in reversed(programs):
                program.end()
    print(f"first use: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
