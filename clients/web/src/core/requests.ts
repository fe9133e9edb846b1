// Requests that wait for an answer: Login, ReConn, Sync, Pull, Heartbeat, Logout. Each is sent again by timer with back-off;
// an answer "pending" or "later" begins its count anew; a third unanswered one means that the connection is dead (R3).
//
// Bounded by what is outstanding: one login, one Sync, one heartbeat and a handful of pulls.
import { type Chance, RETRY_MAX_MS, type Timing } from "./timing";
import type { CmdType } from "../wire/client_pb";

export const UNANSWERED_MAX = 3;

/** One frame that waits for its answer. subject, fromSeq: a gap's conversation and first seq. */
export interface Request {
  kind: CmdType;
  ref: number;
  frame: Uint8Array;
  dueMs: number;
  subject: string;
  fromSeq: number;
  /** Sends since the last sign that it was received. */
  unanswered: number;
  /** Answers "later" in a row. */
  later: number;
}

export class Requests {
  private open = new Map<string, Request>();

  constructor(private readonly timing: Timing, private readonly chance: Chance) {}

  get size(): number {
    return this.open.size;
  }

  /** Registers a request as sent now; returns its frame. */
  ask(kind: CmdType, ref: number, frame: Uint8Array, nowMs: number, subject = "", fromSeq = 0): Uint8Array {
    const dueMs = nowMs + this.timing.backoffMs(0, this.chance);
    this.open.set(key(kind, ref), { kind, ref, frame, dueMs, subject, fromSeq, unanswered: 1, later: 0 });
    return frame;
  }

  find(kind: CmdType, ref: number): Request | undefined {
    return this.open.get(key(kind, ref));
  }

  /** The open request of this type, if there is one and no second: what an answer without a ref must mean. */
  only(kind: CmdType): Request | undefined {
    const found = [...this.open.values()].filter((r) => r.kind === kind);
    return found.length === 1 ? found[0] : undefined;
  }

  /** Takes the request out: it is answered, or not wanted any more. */
  done(kind: CmdType, ref: number): void {
    this.open.delete(key(kind, ref));
  }

  /** It was received: the count begins anew. */
  pending(request: Request, nowMs: number): void {
    request.unanswered = 1;
    request.dueMs = nowMs + this.timing.backoffMs(0, this.chance);
  }

  /** It was answered "later": the same again after the time told, else after a back-off. */
  putOff(request: Request, nowMs: number, toldMs = 0): void {
    request.unanswered = 0;
    request.dueMs = nowMs + (Math.min(toldMs, RETRY_MAX_MS) || this.timing.laterMs(request.later, this.chance));
    request.later += 1;
  }

  /** The frames to send again now; null: one of them was unanswered for the third time. */
  expire(nowMs: number): Uint8Array[] | null {
    const frames: Uint8Array[] = [];
    for (const request of this.open.values()) {
      if (request.dueMs > nowMs) continue;
      if (request.unanswered >= UNANSWERED_MAX) return null;
      request.dueMs = nowMs + this.timing.backoffMs(request.unanswered, this.chance);
      request.unanswered += 1;
      frames.push(request.frame);
    }
    return frames;
  }

  deadlineMs(): number | null {
    let best: number | null = null;
    for (const r of this.open.values()) best = best === null ? r.dueMs : Math.min(best, r.dueMs);
    return best;
  }

  clear(): void {
    this.open.clear();
  }
}

const key = (kind: CmdType, ref: number): string => `${kind} ${ref}`;
