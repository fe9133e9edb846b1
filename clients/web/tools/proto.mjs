// Writes src/wire/*_pb.ts from libs/plato/wire/v1/*.proto. protoc comes with the Python package grpcio-tools.
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import path from "node:path";

const here = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const root = path.resolve(here, "../..");
const python = process.env.PLATO_PYTHON ?? path.join(root, ".venv/bin/python");
const from = path.join(root, "libs/plato/wire/v1");
execFileSync(
  python,
  ["-m", "grpc_tools.protoc", `-I${from}`, `--plugin=protoc-gen-es=${path.join(here, "node_modules/.bin/protoc-gen-es")}`,
    `--es_out=${path.join(here, "src/wire")}`, "--es_opt=target=ts", "client.proto", "content.proto"],
  { stdio: "inherit" },
);
