"""The testbed's own images, and putting any image onto the nodes.

An image of ours is one static program in an otherwise empty file system, written as a docker-archive without any tool.
Others come as archives too (`buildah push NAME docker-archive:FILE:NAME`) and are imported node by node; there is no
registry, so pods say `imagePullPolicy: Never`.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Final

from e2e.testbed.layout import Layout, NodeNames, TestbedError
from e2e.testbed.processes import run

PAUSE: Final = "localhost/plato-tb-pause:1"
BOX: Final = "localhost/plato-tb-box:1"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def pack(program: Path, name: str, archive: Path) -> None:
    """Write an image whose only file and entry point is the program, run as nobody (65534)."""
    layer = _tar({program.name: (program.read_bytes(), 0o755)})
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65534:65534"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created_by": "e2e/testbed/images.py"}],
    }
    encoded = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    files = {"manifest.json": manifest, config_name: encoded, "layer.tar": layer}
    archive.write_bytes(_tar({file: (content, 0o644) for file, content in files.items()}))


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def load(layout: Layout, node: NodeNames, archive: Path) -> None:
    """Import an archive (docker-archive or OCI) onto the node; raises TestbedError."""
    if not archive.is_file():
        raise TestbedError(f"there is no image archive {archive}")
    run(["ctr", "--address", node.socket, "--namespace", "k8s.io", "images", "import", archive])
