// Builds the chat page into libs/plato/web, or into the folder that is named: the same bytes wherever it runs.
import { build } from "esbuild";
import { cp, mkdir, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import path from "node:path";

const here = path.dirname(path.dirname(fileURLToPath(import.meta.url)));
const out = path.resolve(process.argv[2] ?? path.join(here, "../../libs/plato/web"));
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
const common = { bundle: true, minify: true, target: ["chrome111", "firefox115", "safari16.4"], legalComments: "none", charset: "utf8", logLevel: "warning", absWorkingDir: here };
await build({
  ...common, entryPoints: { page: "src/page/main.tsx" }, outdir: out, format: "esm", jsx: "automatic", jsxImportSource: "preact",
});
await build({ ...common, entryPoints: { plato: "src/index.ts" }, outdir: out, format: "esm" });
await build({ ...common, entryPoints: { page: "src/page/page.css" }, outdir: out });
for (const name of ["index.html", "icon.svg"]) await cp(path.join(here, "src/page", name), path.join(out, name));
