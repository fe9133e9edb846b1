"""Putting built images onto the testbed's nodes: each node gets, in one archive, the layers that it lacks."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

from e2e.images.build import Store
from e2e.testbed.layout import Layout, NodeNames, TestbedError
from e2e.testbed.processes import run

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_NAME: Final = "io.containerd.image.name"


def load(layout: Layout, store: Store, images: Mapping[str, str]) -> None:
    """Every node has {reference: digest of its manifest} afterwards; raises TestbedError."""
    if not layout.marker.exists():
        raise TestbedError("no testbed runs; `make testbed-up` starts one")
    with ThreadPoolExecutor(len(layout.nodes)) as pool:
        for told in pool.map(lambda node: _load(node, store, images), layout.nodes):
            if told:
                print(told, flush=True)


def _load(node: NodeNames, store: Store, images: Mapping[str, str]) -> str:
    there = on_node(node)
    wanted = {name: digest for name, digest in images.items() if there.get(name) != digest}
    if not wanted:
        return ""
    held = set(run([*_ctr(node), "content", "ls", "--quiet"]).split())
    needed = {digest for manifest in wanted.values() for digest in store.blobs(manifest)}
    # Manifests always: the import walks them. A layer whose last image went meanwhile is missed by the import: then all.
    for blobs in (needed - held | set(wanted.values()), needed):
        failed = _import(node, store, wanted, blobs)
        if not failed:
            size = sum(store.blob(digest).stat().st_size for digest in blobs)
            return f"{node.name}: {len(wanted)} images, {size / (1 << 20):.1f} MB"
    raise TestbedError(f"{node.name} does not take {', '.join(wanted)}: {failed}")


def name_again(layout: Layout, names: Mapping[str, str]) -> None:
    """Every node knows its image {old name: new name} by the new name too; raises TestbedError."""
    for node in layout.nodes:
        for old, new in names.items():
            run([*_ctr(node), "images", "tag", "--force", old, new])


def on_node(node: NodeNames) -> dict[str, str]:
    """{reference: digest} of the images that a node holds."""
    lines = run([*_ctr(node), "images", "ls"]).splitlines()[1:]
    return {words[0]: words[2] for words in map(str.split, lines)}


def _ctr(node: NodeNames) -> list[str | Path]:
    return ["ctr", "--address", node.socket, "--namespace", "k8s.io"]


def _import(node: NodeNames, store: Store, images: Mapping[str, str], blobs: Iterable[str]) -> str:
    """What ctr said against it, or nothing."""
    words = [str(word) for word in (*_ctr(node), "images", "import", "-")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ctr:
        assert ctr.stdin is not None
        assert ctr.stdout is not None
        try:
            write_archive(ctr.stdin, store, images, blobs)
            ctr.stdin.close()
        except BrokenPipeError:
            pass  # it ended early; its own words say why
        said = ctr.stdout.read().decode(errors="replace").strip()
    return said[-1000:] or "it says nothing" if ctr.returncode else ""


def write_archive(file: IO[bytes], store: Store, images: Mapping[str, str], blobs: Iterable[str] = ()) -> None:
    """An OCI archive of {reference: digest}, with these blobs only if any are named."""
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": _MANIFEST,
                "digest": digest,
                "size": store.blob(digest).stat().st_size,
                "annotations": {_NAME: name, "org.opencontainers.image.ref.name": name},
            }
            for name, digest in images.items()
        ],
    }
    every = {digest for manifest in images.values() for digest in store.blobs(manifest)}
    with tarfile.open(fileobj=file, mode="w|") as tar:
        _add(tar, "oci-layout", {"imageLayoutVersion": "1.0.0"})
        _add(tar, "index.json", index)
        for digest in sorted(set(blobs) or every):
            tar.add(store.blob(digest), f"blobs/sha256/{digest.removeprefix('sha256:')}", recursive=False)


def _add(tar: tarfile.TarFile, name: str, value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
