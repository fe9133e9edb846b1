"""The commands and programs of a page of docs/, done as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from plato.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
PATIENT: Final = r"""
curl() { # what is answered 202 is asked again under the same key, as http-api.md says: a busy machine needs over two seconds
    local key said code
    key=$(cat /proc/sys/kernel/random/uuid)
    while :; do
        code=0
        said=$(command curl -H "Idempotency-Key: $key" -w '\n%{http_code}' "$@") || code=$?
        [ "${said##*$'\n'}" = 202 ] || break
    done
    printf '%s' "${said%$'\n'*}"
    return "$code"
}
"""
"""How a reader with patience takes an answer that is not one yet."""


def run(cluster: LocalCluster, page: str) -> str:
    """Runs the shell blocks of a page against a cluster, as one script; what it prints. AssertionError where one fails."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, f"docs/{page} has no commands"
    if not any("%{http_code}" in block for block in blocks):
        blocks.insert(0, PATIENT)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks).replace("http://127.0.0.1:8903", cluster.api_url)],
        cwd=ROOT,
        env={**os.environ, "PLATO_LOCAL__DATA_DIR": str(cluster.data_dir)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_program(cluster: LocalCluster, page: str, folder: Path) -> None:
    """Runs the only program of a page for alice and bob, twice: also where people have talked already, on a device that is
    new. It has to print what the page says."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"\nprints\n\n```\n(.*?)```", text, re.DOTALL)
    for run_of in ("first", "second"):
        (folder / run_of).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", program, cluster.token("alice"), cluster.token("bob"), cluster.gateways[0]],
            cwd=folder / run_of,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.stdout == printed, done.stderr
