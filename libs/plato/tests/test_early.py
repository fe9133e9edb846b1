"""A first process that is still importing ends at a SIGTERM, instead of losing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _run(pid: str) -> int:
    words = f"import os, time; real = os.getpid(); os.getpid = lambda: {pid}; import plato.runtime.early; "
    words += "import signal; signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and os._exit(7); "
    words += "os.kill(real, 15); time.sleep(20)"
    return subprocess.run([sys.executable, "-c", words], timeout=30, check=False).returncode


def test_the_first_process_ends_at_a_sigterm_while_it_imports() -> None:
    assert _run("1") == 128 + 15


def test_any_other_process_keeps_what_it_had() -> None:
    assert _run("real") == 7


def test_every_service_imports_it_before_all_else() -> None:
    mains = [*ROOT.glob("images/*/plato_*/__main__.py"), ROOT / "operator/plato_operator/__main__.py"]
    assert len(mains) == 5
    for main in mains:
        imports = [line for line in main.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert imports[1].startswith("import plato.runtime.early"), main
