// The race for a gateway: the addresses of one round, each tried a little after the one before; the first that opens wins.
//
//   next ──> started ──> opened: won, the others are given up and come first should the winner be of no use
//              │  └────> failed, or took too long: the next one at once
//              └ connectDelay without an answer: the next one beside it, AT_ONCE at most
//
// Only on the winner anything is sent, so two logins of one device never race each other. Memory: one round's addresses.
import type { Gateways } from "./gateways";
import type { Timing } from "./timing";

export const AT_ONCE = 3;

export class Race {
  private running = new Map<number, { address: string; untilMs: number }>(); // by linkNo, in the order of starting
  private nextMs = 0;

  constructor(private readonly book: Gateways, private readonly timing: Timing) {}

  /** Nothing runs, and no address is left. */
  get lost(): boolean {
    return this.running.size === 0 && this.book.left === 0;
  }

  /** The address to try now, beside what runs; undefined: not yet, or none is left. */
  next(nowMs: number): string | undefined {
    if (this.running.size > 0 && (nowMs < this.nextMs || this.running.size >= AT_ONCE)) return undefined;
    return this.book.take();
  }

  started(linkNo: number, address: string, nowMs: number): void {
    this.running.set(linkNo, { address, untilMs: nowMs + this.timing.connectTimeoutMs });
    this.nextMs = nowMs + this.timing.connectDelayMs;
  }

  /** An attempt failed: the next one need not wait. False: it is none of ours. */
  failed(linkNo: number, nowMs: number): boolean {
    if (!this.running.delete(linkNo)) return false;
    this.nextMs = nowMs;
    return true;
  }

  /** The attempts that took too long; they are given up. */
  expire(nowMs: number): number[] {
    const late = [...this.running].filter(([, attempt]) => attempt.untilMs <= nowMs).map(([linkNo]) => linkNo);
    for (const linkNo of late) this.failed(linkNo, nowMs);
    return late;
  }

  /** An attempt opened; its address. undefined: it is none of ours. The others are to be given up: see `cancel`. */
  won(linkNo: number): string | undefined {
    const address = this.running.get(linkNo)?.address;
    this.running.delete(linkNo);
    return address;
  }

  /** Gives up what runs; its addresses are tried first if the round goes on. Returns their numbers. */
  cancel(): number[] {
    const givenUp = [...this.running.keys()];
    this.book.putBack([...this.running.values()].map((attempt) => attempt.address));
    this.running.clear();
    return givenUp;
  }

  deadlineMs(): number | null {
    const moments = [...this.running.values()].map((attempt) => attempt.untilMs);
    if (this.running.size > 0 && this.running.size < AT_ONCE && this.book.left > 0) moments.push(this.nextMs);
    return moments.length > 0 ? Math.min(...moments) : null;
  }
}
