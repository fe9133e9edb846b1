// The inbox: per conversation the cursor, the reorder buffer and the gap that a pull must fill.
//
// A row moves the cursor only if nothing lies between: prevSeq ≤ cursor < seq (prevSeq is the seq of the row before it, so a
// hole in the numbers is passed only by a row, or by a page, that says so). What comes too early waits in the reorder buffer
// while pulls fetch the gap in pages from the cursor up; a page moves the cursor to the end of the range it covers. A row is
// handed out once, in order, in the call that moves the cursor over it.
//
// Memory: a few words per conversation; the reorder buffer is bounded over all conversations, what does not fit is pulled.
import { compareIds } from "./bytes";
import { isDialogue, isGroup } from "./conversations";
import { type Place, type Row, UNPLACED } from "./model";
import type { Cursors } from "./syncwalk";

export const BUFFER_ROWS = 1_000;
export const BUFFER_BYTES = 4 * 1024 * 1024;

/** One conversation. newestSeq: the greatest seq heard of, so newestSeq > cursor means a gap. */
export class Thread {
  readonly conversationId: string;
  peer = "";
  title = "";
  members = 0;
  left = false;
  groupSeq = 0;
  cursor = UNPLACED;
  floor = 0;
  newestSeq = 0;
  readSeq = 0;
  readWanted = 0;
  pinnedAtMs = 0;
  mutedUntilMs = 0;
  peerReadSeq = 0;
  clearedSeq = 0;
  early = new Map<number, Row>(); // by prevSeq

  constructor(conversationId: string, place?: Place) {
    this.conversationId = conversationId;
    if (!place) return;
    const { nextClientId: _outboxes, conversationId: _same, ...kept } = place;
    Object.assign(this, kept);
  }

  place(nextClientId: number): Place {
    const { early: _memory, ...kept } = this;
    return { ...kept, nextClientId } as Place;
  }

  /** Whether the first cursor is known. */
  get placed(): boolean {
    return this.cursor !== UNPLACED;
  }

  /**
   * Whether a Sync has still to tell a group's title and members, or whom a dialogue is with: this user's own rows, written on
   * another device, do not.
   */
  get untold(): boolean {
    if (this.cursor <= 0) return false;
    if (isGroup(this.conversationId)) return this.members === 0 && !this.left;
    return this.peer === "" && isDialogue(this.conversationId);
  }

  /** Whether rows are known of that are not stored. */
  get behind(): boolean {
    return this.newestSeq > Math.max(this.cursor, 0);
  }
}

export class Inbox {
  private threads_: Map<string, Thread>;
  private earlyRows = 0;
  private earlyBytes = 0;

  /** tail: a conversation that is new here and longer than this begins so far before its end; 0: at its beginning. */
  constructor(threads: Thread[], private readonly tail: number) {
    this.threads_ = new Map(threads.map((t) => [t.conversationId, t]));
  }

  threads(): Thread[] {
    return [...this.threads_.values()];
  }

  find(conversationId: string): Thread | undefined {
    return this.threads_.get(conversationId);
  }

  /** The conversation, known from now on. */
  get(conversationId: string): Thread {
    let thread = this.threads_.get(conversationId);
    if (!thread) this.threads_.set(conversationId, (thread = new Thread(conversationId)));
    return thread;
  }

  /** The cursors of every placed conversation, for Sync, which lists those that are newer; so of who is to be told anyway, the
   * cursor is one too low. */
  cursors(): Cursors {
    const pairs: Cursors = [];
    for (const t of this.threads_.values()) if (t.placed) pairs.push([t.conversationId, t.cursor - Number(t.untold)]);
    return pairs.sort(([a], [b]) => compareIds(a, b));
  }

  behind(): string[] {
    return this.threads().filter((t) => t.behind).map((t) => t.conversationId);
  }

  /** A Sync told where a reader of this conversation starts; early rows may fit now. */
  place(thread: Thread, firstCursor: number): Row[] {
    if (!thread.placed) {
      const long = this.tail > 0 && thread.newestSeq - firstCursor > this.tail;
      thread.cursor = thread.floor = long ? thread.newestSeq - this.tail : firstCursor;
    }
    return this.drain(thread);
  }

  /** A pushed row, or an own one by its receipt. Returns what became readable, in order. */
  offer(thread: Thread, row: Row): Row[] {
    if (row.seq <= thread.cursor) return [];
    thread.newestSeq = Math.max(thread.newestSeq, row.seq);
    if (!thread.placed && row.prevSeq === 0) thread.cursor = 0;
    if (thread.placed && row.prevSeq <= thread.cursor) {
      thread.cursor = row.seq;
      return [row, ...this.drain(thread)];
    }
    const fits = this.earlyRows < BUFFER_ROWS && this.earlyBytes + row.body.length <= BUFFER_BYTES;
    if (fits && !thread.early.has(row.prevSeq)) {
      thread.early.set(row.prevSeq, row);
      this.earlyRows += 1;
      this.earlyBytes += row.body.length;
    }
    return [];
  }

  /**
   * A pulled page, rows by rising seq. Returns what became readable, and whether the cursor moved or the gap closed. A page
   * that begins beyond the cursor is of no use here and changes nothing.
   */
  page(thread: Thread, rows: Row[], coveredFrom: number, coveredTo: number, newestSeq: number): [Row[], boolean] {
    if (!thread.placed || coveredFrom > thread.cursor + 1) return [[], false];
    const before = thread.cursor;
    const newest = Math.max(newestSeq, rows[rows.length - 1]?.seq ?? 0);
    const upto = Math.min(coveredTo, newest); // what does not exist yet is not covered, whatever a page says
    const readable = rows.filter((row) => before < row.seq && row.seq <= upto);
    thread.cursor = Math.max(before, upto);
    thread.newestSeq = Math.max(thread.newestSeq, newest);
    readable.push(...this.drain(thread));
    return [readable, thread.cursor > before || !thread.behind];
  }

  /** The conversation is known to reach up to newestSeq. */
  hint(thread: Thread, newestSeq: number): void {
    thread.newestSeq = Math.max(thread.newestSeq, newestSeq);
  }

  /** Its rows may not be read any more: no gap, nothing early. */
  giveUp(thread: Thread): void {
    for (const row of thread.early.values()) this.forget(row);
    thread.early.clear();
    thread.newestSeq = Math.max(thread.cursor, 0);
  }

  /** Moves early rows over the cursor as long as one fits; drops those that it has passed. */
  private drain(thread: Thread): Row[] {
    const readable: Row[] = [];
    if (thread.early.size === 0 || !thread.placed) return readable;
    for (const prevSeq of [...thread.early.keys()].sort((a, b) => a - b)) {
      if (prevSeq > thread.cursor) break;
      const row = thread.early.get(prevSeq)!;
      thread.early.delete(prevSeq);
      this.forget(row);
      if (row.seq > thread.cursor) {
        thread.cursor = row.seq;
        readable.push(row);
      }
    }
    return readable;
  }

  private forget(row: Row): void {
    this.earlyRows -= 1;
    this.earlyBytes -= row.body.length;
  }
}
