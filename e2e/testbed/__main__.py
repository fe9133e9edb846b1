"""The testbed's commands: `python -m e2e.testbed up`, `down`, `status`, `load`, `node`, `build`.

Run it from the checkout's root. Exit code 0 when it is as asked, 1 with a reason in words when not,
2 when this machine cannot run it at all.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.testbed import binaries, control, images, machine, teardown
from e2e.testbed.layout import Layout, MachineError, TestbedError, layout
from e2e.testbed.node import READY_WITHIN_S, Node, ready
from e2e.testbed.processes import daemons, until

CANNOT = 2


def main() -> int:
    """Do what the command line says."""
    arguments = _parser().parse_args()
    here = layout(arguments.state)
    try:
        other = os.environ.get("PLATO_E2E_KUBECONFIG")
        if other:
            _leave_alone(Path(other), arguments.command)
        else:
            _COMMANDS[arguments.command](here, arguments)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return CANNOT if isinstance(error, MachineError) else 1
    except KeyboardInterrupt:
        print("testbed: interrupted; `make testbed-down` removes what is there", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.testbed", description="A real Kubernetes on this machine.")
    parser.add_argument("--state", help="folder of the run, default PLATO_TESTBED_STATE or /var/lib/plato-testbed")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="bring it up, or say that it runs")
    commands.add_parser("down", help="end it and remove all of it; the cache of binaries stays")
    commands.add_parser("status", help="what runs; exit code 1 unless all of it does")
    commands.add_parser("build", help="build the binaries into the cache, start nothing")
    load = commands.add_parser("load", help="put image archives onto every node")
    load.add_argument("archives", nargs="+", type=Path)
    node = commands.add_parser("node", help="do something to a node")
    node.add_argument("what", choices=["lose", "recover", "cut", "mend", "exec"])
    node.add_argument("name", help="node1, node2 or node3")
    node.add_argument("words", nargs=argparse.REMAINDER, help="for exec: the command to run in its namespaces")
    return parser


def _leave_alone(kubeconfig: Path, command: str) -> None:
    """With another cluster named there is nothing to bring up or down, and its nodes are not ours to touch."""
    if command not in ("up", "down"):
        raise TestbedError(
            f"PLATO_E2E_KUBECONFIG names another cluster ({kubeconfig}); `{command}` is for the testbed's own nodes"
        )
    if not kubeconfig.is_file():
        raise TestbedError(f"PLATO_E2E_KUBECONFIG names {kubeconfig}, and there is no such file")
    print(f"PLATO_E2E_KUBECONFIG names another cluster ({kubeconfig}): there is nothing to bring {command}")


@contextmanager
def _alone(here: Layout) -> Iterator[None]:
    """Hold the lock that keeps a second `up` or `down` out; it is on the cache folder, so that it leaves no file behind."""
    here.cache.mkdir(parents=True, exist_ok=True)
    folder = os.open(here.cache, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TestbedError("another `up`, `down` or `build` is at work; wait for it") from error
        yield
    finally:
        os.close(folder)


def _up(here: Layout, _: argparse.Namespace) -> None:
    machine.check(here.state)
    teardown.check_state(here)
    machine.install()
    with _alone(here):
        if here.marker.exists():
            dead = _dead(here)
            if not dead:
                print("the testbed runs already")
                _say_how(here)
                return
            if any(daemon.pid for daemon in daemons(here)):
                raise TestbedError(
                    f"it runs, but not whole: {', '.join(dead)}. `make testbed-down` first, then up again"
                )
            print("removing what an earlier run left", flush=True)
            teardown.down(here)
        machine.check_network()
        programs = {module.name: binaries.provide(here, module) for module in binaries.MODULES}
        began = time.monotonic()
        try:
            _start(here, programs)
        except BaseException:
            print(f"it did not start; its logs are in {here.logs}; `make testbed-down` removes it", file=sys.stderr)
            raise
        print(f"up in {time.monotonic() - began:.0f} s")
        _say_how(here)


def _start(here: Layout, programs: dict[str, Path]) -> None:
    teardown.claim(here)
    for module in (binaries.KUBE, binaries.COREDNS, binaries.HELM):
        for program in module.programs:
            (here.bin / program).symlink_to(programs[module.name] / program)
    images.pack(programs["images"] / "pause", images.PAUSE, here.images / "pause.tar")
    images.pack(programs["images"] / "box", images.BOX, here.images / "box.tar")
    control.add_bridge()
    control.start(here)
    print("the control plane is up", flush=True)
    for names in here.nodes:
        Node(here, names).start()
    expected = {names.name: True for names in here.nodes}
    log = here.logs / "node1-kubelet.log"
    until(lambda: ready(here) == expected, READY_WITHIN_S, "three nodes to be Ready", log=log, poll_s=0.3)
    print("three nodes are Ready", flush=True)


def _dead(here: Layout) -> list[str]:
    """What should run and does not, in words."""
    known = daemons(here)
    dead = [f"{daemon.name} ended" for daemon in known if daemon.pid is None]
    finished = {"kube-apiserver", *(f"{names.name}-kube-proxy" for names in here.nodes)} <= {
        daemon.name for daemon in known
    }
    return dead if finished else [*dead, "its start did not finish"]


def _say_how(here: Layout) -> None:
    print("use it with:")
    print(f"  export KUBECONFIG={here.kubeconfig} PATH={here.bin}:$PATH")
    print(f"logs are in {here.logs}; `make testbed-down` ends it")


def _down(here: Layout, _: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise TestbedError("only root can take it down: run it with sudo")
    with _alone(here):
        teardown.down(here)
    print("the testbed is down, and nothing of it is left but the cache of binaries")


def _status(here: Layout, _: argparse.Namespace) -> None:
    if not here.marker.exists():
        raise TestbedError("no testbed runs; `make testbed-up` starts one")
    for daemon in daemons(here):
        print(f"{daemon.name:28} {'pid ' + str(daemon.pid) if daemon.pid else 'ended'}")
    nodes = ready(here) if control.api_answers(here) else {}
    for names in here.nodes:
        print(f"{names.name:28} {'Ready' if nodes.get(names.name) else 'not Ready'}")
    if _dead(here) or not all(nodes.get(names.name) for names in here.nodes):
        raise TestbedError("not all of it runs")


def _build(here: Layout, _: argparse.Namespace) -> None:
    with _alone(here):
        for module in binaries.MODULES:
            print(f"{module.name}: {binaries.provide(here, module)}")


def _load(here: Layout, arguments: argparse.Namespace) -> None:
    for archive in arguments.archives:
        for names in here.nodes:
            images.load(here, names, archive.resolve())


def _node(here: Layout, arguments: argparse.Namespace) -> None:
    node = Node(here, here.node(arguments.name))
    if arguments.what == "exec":
        if not arguments.words:
            raise TestbedError("say which command to run")
        command = [str(word) for word in node.inside(*arguments.words)]
        os.execvp(command[0], command)
    {"lose": node.lose, "recover": node.recover, "cut": node.cut, "mend": node.mend}[arguments.what]()


_COMMANDS = {"up": _up, "down": _down, "status": _status, "build": _build, "load": _load, "node": _node}

if __name__ == "__main__":
    sys.exit(main())
