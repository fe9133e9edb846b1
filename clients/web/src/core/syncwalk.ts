// One Sync: pages keyed by conversation_id. The ids we know are cut into chunks of at most 500 cursors, each asked as the
// range (after_id, upto_id]; the last chunk is open-ended, so that unknown conversations show too. A page says up to which id
// it covers; the walk asks on from there. Bounded by one page at a time; cursors are read anew for each request.
import { compareIds } from "./bytes";

export const MAX_CURSORS = 500;

/** (conversation_id, cursor) pairs, sorted by the ids' UTF-8 bytes. */
export type Cursors = [string, number][];

export class SyncWalk {
  afterId = "";
  private uptoId = "";

  /** The next page. */
  ask(cursors: Cursors): { afterId: string; uptoId: string; cursors: Cursors } {
    const rest = this.afterId ? cursors.filter(([id]) => compareIds(id, this.afterId) > 0) : cursors;
    const chunk = rest.slice(0, MAX_CURSORS);
    this.uptoId = rest.length > MAX_CURSORS ? chunk[chunk.length - 1]![0] : "";
    return { afterId: this.afterId, uptoId: this.uptoId, cursors: chunk };
  }

  /** A page came: "on" asks the next, "done": all is covered, "stuck": the page made no way, ask the same later. */
  answered(more: boolean, coveredId: string): "on" | "done" | "stuck" {
    if (more) {
      if (compareIds(coveredId, this.afterId) <= 0) return "stuck";
      this.afterId = coveredId;
      return "on";
    }
    if (!this.uptoId) return "done";
    this.afterId = this.uptoId;
    return "on";
  }
}
