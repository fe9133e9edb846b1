// What the chat page says before it asks the server.
import { describe, expect, it } from "vitest";
import { tooLarge, unreachable } from "../src/page/lines";

describe("what the page refuses by itself", () => {
  it("is a file that is larger than the server takes, with both sizes", () => {
    const most = 25 * 1024 * 1024;
    expect(tooLarge(most, most)).toBe("");
    expect(tooLarge(30 * 1024 * 1024, most)).toBe("Too large: 30.0 MB, and files have at most 25.0 MB here.");
  });

  it("is a name that no person has", () => {
    expect(unreachable("bob")).toBe("");
    expect(unreachable("guest:1")).toBe("");
    expect(unreachable("a\u202eb")).toContain("invisible");
    expect(unreachable("admin")).toContain("administrators");
  });
});
