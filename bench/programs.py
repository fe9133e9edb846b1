"""The programs beside Plato: ours in C, nats-server from its Go module, mosquitto from the machine or Debian's package.

Each lies in a cache folder outside the checkout, named by what its content depends on. What a machine cannot have is None,
and `missing` says in words why; the tables then say so too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
C_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")
C_PROGRAMS = ("server", "load", "link", "people")
NATS_PACKAGE = "github.com/nats-io/nats-server/v2"
MOSQUITTO_PACKAGES = ("mosquitto", "libwrap0", "libdlt2", "libcjson1", "libmosquitto1")
"""The broker and those of its libraries that a small Debian lacks."""


@dataclass(frozen=True)
class Program:
    """A program and the folder of libraries that it needs ("" where the machine has them)."""

    path: Path
    libraries: str = ""

    @property
    def env(self) -> dict[str, str]:
        """Its environment."""
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries} if self.libraries else dict(os.environ)


class Programs:
    """`c` is ours by name; `nats`, `mosquitto` are the peers or None. `missing`: what there is not → why, in words."""

    def __init__(self, *, peers: bool = True) -> None:
        self.missing: dict[str, str] = {}
        self.c: dict[str, Path] = {}
        self._provide("C compiler", self._build_c)
        self.nats = self._provide("NATS", _nats) if peers else None
        self.mosquitto = self._provide("mosquitto", _mosquitto) if peers else None

    def _provide(self, name: str, provide: Callable[[], Program]) -> Program | None:
        try:
            return provide()
        except _Missing as e:
            self.missing[name] = str(e)
            return None

    def _build_c(self) -> Program:
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
        if compiler is None:
            raise _Missing(
                "there is no C compiler (cc, gcc or clang) on the PATH: all measurements but the list need one"
            )
        version = _run([compiler, "--version"])

        def build(folder: Path) -> None:
            for name in C_PROGRAMS:
                _run([compiler, *C_FLAGS, "-o", str(folder / name), str(HERE / "c" / f"{name}.c")])

        sources = sorted((HERE / "c").iterdir())
        folder = _cached("c", [version, *C_FLAGS, *(f"{s.name}\0{s.read_text()}" for s in sources)], build)
        self.c = {name: folder / name for name in C_PROGRAMS}
        return Program(folder)


class _Missing(Exception):
    """This machine cannot have it."""


def _run(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise _Missing(f"`{' '.join(map(str, command[:3]))} …` failed: {words[-1][:300]}")
    return done.stdout


def _cached(name: str, content: Sequence[str], build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, named by a hash of `content`; whole or absent. Older ones of the name go."""
    digest = hashlib.sha256("\0".join([*content, platform.machine()]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("PLATO_CACHE") or "~/.cache/plato").expanduser().absolute() / "bench"
    folder = cache / f"{name}-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"unfinished-{name}-", dir=cache))
        try:
            build(unfinished)
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    os.utime(folder)
    kept = sorted(cache.glob(f"{name}-*"), key=lambda f: f.stat().st_mtime, reverse=True)[:2]
    for old in cache.glob(f"{name}-*"):
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _nats() -> Program:
    if shutil.which("go") is None:
        raise _Missing("there is no `go` on the PATH; nats-server is built from its Go module")
    version = _run(["go", "version"], cwd=Path("/"))
    module = HERE / "nats"

    def build(folder: Path) -> None:
        print("building nats-server …", flush=True)
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}
        flags = ["-trimpath", "-buildvcs=false", "-mod=readonly"]
        _run(["go", "build", *flags, "-o", str(folder / "nats-server"), NATS_PACKAGE], cwd=module, env=env)

    content = [version, (module / "go.mod").read_text(), (module / "go.sum").read_text()]
    return Program(_cached("nats", content, build) / "nats-server")


def _mosquitto() -> Program:
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if found is not None:
        return Program(Path(found))
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise _Missing("there is no `mosquitto` on the PATH, and no apt-get to fetch Debian's package with")

    def build(folder: Path) -> None:
        print("fetching mosquitto …", flush=True)
        # Downloaded and unpacked, not installed: no service is started, nothing on the machine changes.
        _run(["apt-get", "download", *MOSQUITTO_PACKAGES], cwd=folder)
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(folder / "root")])
            package.unlink()

    policy = _run(["apt-cache", "show", "--no-all-versions", "mosquitto"])
    root = _cached("mosquitto", [policy], build) / "root"
    libraries = ":".join(sorted({str(file.parent) for file in root.rglob("*.so.*")}))
    return Program(root / "usr/sbin/mosquitto", libraries)


def versions(programs: Programs) -> dict[str, str]:
    """What stands in the results: peer → its own word on its version."""
    said = {}
    if programs.nats is not None:
        said["NATS"] = _run([str(programs.nats.path), "--version"]).strip()
    if programs.mosquitto is not None:
        done = subprocess.run(
            [str(programs.mosquitto.path), "-h"],
            env=programs.mosquitto.env,
            capture_output=True,
            text=True,
            check=False,
        )
        said["mosquitto"] = done.stdout.splitlines()[0] if done.stdout else "?"
    return said
