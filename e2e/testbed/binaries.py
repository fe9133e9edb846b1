"""The programs, built from source through the Go module proxy and kept in a cache outside the checkout.

A cache folder is named by what its content depends on: the module's go.mod, go.sum and sources, the flags, the Go
version and the machine's architecture. A build goes into a neighbour that is renamed when complete, so that a folder
under its name is whole. The two newest folders of each module stay.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.testbed.layout import Layout, TestbedError
from e2e.testbed.machine import check_go

SOURCE: Final = Path(__file__).resolve().parent / "go"
KUBERNETES_VERSION: Final = "1.37.2"
HELM_VERSION: Final = "4.3.2"
KEPT: Final = 2
_VERSION_IN: Final = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_KUBERNETES_LDFLAGS: Final = (
    f"-s -w -X {_VERSION_IN}.gitVersion=v{KUBERNETES_VERSION} -X {_VERSION_IN}.gitMajor={_MAJOR}"
    f" -X {_VERSION_IN}.gitMinor={_MINOR} -X {_VERSION_IN}.gitTreeState=clean"
)


@dataclass(frozen=True)
class Module:
    """A Go module below `go/`; each of `packages` becomes a program named by its last part."""

    name: str
    packages: tuple[str, ...]
    ldflags: str = "-s -w"

    @property
    def programs(self) -> list[str]:
        """Names of the programs."""
        return [package.rsplit("/", 1)[-1] for package in self.packages]

    @property
    def folder(self) -> Path:
        """Where its go.mod lies."""
        return SOURCE / self.name

    def _flags(self) -> list[str]:
        return ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", self.ldflags]

    def key(self, go_version: str) -> str:
        """Name of its cache folder."""
        digest = hashlib.sha256()
        for file in sorted(self.folder.rglob("*")):
            if file.suffix in {".go", ".mod", ".sum"}:
                digest.update(f"{file.relative_to(self.folder)}\0".encode() + file.read_bytes() + b"\0")
        digest.update("\0".join([*self._flags(), *self.packages, go_version, platform.machine()]).encode())
        return f"{self.name}-{digest.hexdigest()[:16]}"

    def build_into(self, folder: Path) -> None:
        """Build all programs into the folder; raises TestbedError with the compiler's words."""
        # The user's GOFLAGS and a go.work above must not change what is built.
        environ = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}
        environ.setdefault("GOMAXPROCS", "2")  # the compiler's own threads; a testbed leaves room for its neighbours
        for package, program in zip(self.packages, self.programs, strict=True):
            began = time.monotonic()
            print(f"  building {program} …", end="", flush=True)
            command = [
                "nice",
                "-n",
                "19",
                "go",
                "build",
                "-p",
                "2",
                *self._flags(),
                "-o",
                str(folder / program),
                package,
            ]
            done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                print(" failed", flush=True)
                raise TestbedError(f"{program} does not build: {done.stderr.strip()[-2000:]}")
            print(f" {time.monotonic() - began:.0f} s", flush=True)


KUBE: Final = Module(
    "kube",
    (
        *(
            f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            )
        ),
        "plato.im/testbed/kube/etcd",
    ),
    _KUBERNETES_LDFLAGS,
)
COREDNS: Final = Module("coredns", ("plato.im/testbed/coredns",))
HELM: Final = Module(
    "helm", ("helm.sh/helm/v4/cmd/helm",), f"-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM_VERSION}"
)
IMAGES: Final = Module("images", ("plato.im/testbed/images/pause", "plato.im/testbed/images/box"))
MODULES: Final = (KUBE, COREDNS, HELM, IMAGES)


def provide(layout: Layout, module: Module) -> Path:
    """The cache folder with the module's programs, built first if it is not there."""
    key = module.key(check_go())
    folder = layout.cache / key
    if not folder.is_dir():
        print(f"{module.name}: building into {folder}", flush=True)
        unfinished = layout.cache / f"unfinished-{key}-{os.getpid()}"
        unfinished.mkdir(parents=True)
        try:
            module.build_into(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    os.utime(folder)
    _forget(layout, module)
    return folder


def _forget(layout: Layout, module: Module) -> None:
    folders = sorted(layout.cache.glob(f"{module.name}-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[KEPT:]:
        shutil.rmtree(folder)
