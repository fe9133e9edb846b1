"""Generates the stubs beside the .proto files; with --check compares and exits 1 if they are stale."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
LIBS = ROOT / "libs"
WIRE = LIBS / "plato" / "wire" / "v1"


def generate(out: Path) -> None:
    """Writes every stub below `out`, in the package's own folders. Raises SystemExit with protoc's code."""
    include = Path(grpc_tools.__file__).parent / "_proto"
    protos = [str(p) for p in sorted(WIRE.glob("*.proto"))]
    services = [p for p in protos if Path(p).stem in {"state", "msg"}]
    common = ["protoc", f"-I{LIBS}", f"-I{include}"]
    tools = Path(sys.executable).parent
    plugins = [f"--plugin={n}={tools / n}" for n in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    code = protoc.main([*common, *plugins, f"--python_out={out}", f"--mypy_out=quiet:{out}", *protos])
    code = code or protoc.main(
        [*common, *plugins, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}", *services]
    )
    if code:
        raise SystemExit(code)


def main() -> int:
    """Entry point; returns the exit code."""
    if "--check" not in sys.argv[1:]:
        generate(LIBS)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = sorted((Path(folder) / "plato/wire/v1").glob("*_pb2*"))
        stale = [f.name for f in fresh if not (WIRE / f.name).exists() or not filecmp.cmp(f, WIRE / f.name, False)]
        extra = [f.name for f in WIRE.glob("*_pb2*") if f.name not in {g.name for g in fresh}]
    for name in stale + extra:
        print(f"{name} is stale: run `make proto` and commit the result")
    return 1 if stale or extra else 0


if __name__ == "__main__":
    raise SystemExit(main())
