// Names that people read: the same cases as plato.core.visible, and that the client sends what the platform takes.
import { readFileSync } from "node:fs";
import { create, fromBinary } from "@bufbuild/protobuf";
import { describe, expect, it } from "vitest";
import { isName } from "../src/core/conversations";
import { saidBody } from "../src/core/content";
import { plain } from "../src/core/visible";
import { AttachmentSchema, RichSchema } from "../src/wire/content_pb";

const cases = JSON.parse(readFileSync(new URL("../../../libs/plato/tests/visible.json", import.meta.url), "utf8")) as { given: string; plain: string }[];

describe("what may stand in a name", () => {
  it("is what Python says", () => {
    expect(cases.length).toBeGreaterThan(30);
    for (const one of cases) expect([one.given, plain(one.given)]).toEqual([one.given, one.plain]);
    for (const one of cases) expect(plain(one.plain)).toBe(one.plain);
  });

  it("is what users are called", () => {
    for (const one of cases) if (one.plain !== "" && !one.given.includes("\u0000")) expect(isName(one.given)).toBe(one.given === one.plain);
  });

  it("is what attachments are sent with", () => {
    const [, body] = saidBody({ text: "", attachments: [create(AttachmentSchema, { attachmentId: "x", name: "gpj.\u202eexe" })] });
    expect(fromBinary(RichSchema, body).attachments[0]!.name).toBe("gpj.exe");
  });
});
