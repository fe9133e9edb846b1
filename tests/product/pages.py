"""The commands of a page of docs/, done as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from plato.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]


def run(cluster: LocalCluster, page: str) -> str:
    """Runs the shell blocks of a page against a cluster, as one script; what it prints. AssertionError where one fails."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, f"docs/{page} has no commands"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks).replace("http://127.0.0.1:8903", cluster.api_url)],
        cwd=ROOT,
        env={**os.environ, "PLATO_LOCAL__DATA_DIR": str(cluster.data_dir)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
