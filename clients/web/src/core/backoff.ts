// How long to stay away: after a round in which no gateway served us, and after a connection that was lost.
//
// Nobody told a code: nothing listens, or what does is mute, and who is back is to be found soon. A code sent us away, or
// connections do not stay: who answers is to be spared.
import { type Chance, RETRY_MAX_MS, jitteredMs } from "./timing";

export const BACKOFF_MIN_MS = 250;
/** Between rounds in which nobody told a code. */
export const BACKOFF_MAX_MS = 5_000;
/** Between rounds in which a code sent us away, and between connections that do not stay. */
export const TOLD_BACKOFF_MAX_MS = 30_000;
/** A connection that stayed this long counts as a success. */
export const STAYED_MS = 2_000;
/** So many in a row may not stay before the next one is put off. */
export const BRIEF_FREE = 4;

export class Backoff {
  private failed = 0; // rounds in a row
  private brief = 0; // connections in a row that did not stay
  private toldMs = 0;
  /** A code came in this round. */
  told = false;

  constructor(private readonly chance: Chance) {}

  beginRound(): void {
    this.told = false;
    this.toldMs = 0;
  }

  /** A gateway said for how long; the one that is free first decides. */
  stayAway(retryMs: number): void {
    this.toldMs = Math.min(retryMs, this.toldMs || retryMs, RETRY_MAX_MS);
  }

  /** A round failed: the wait before the next one. */
  failedMs(): number {
    const delay = jitteredMs(BACKOFF_MIN_MS, this.told ? TOLD_BACKOFF_MAX_MS : BACKOFF_MAX_MS, this.failed, this.chance);
    this.failed += 1;
    return Math.max(delay, this.toldMs);
  }

  /** A connection was lost that stood so long: the wait before it is resumed, a random part of what the platform told. */
  lostMs(stoodMs: number, mostMs: number): number {
    let delay = Math.floor(this.chance() * mostMs);
    this.failed = 0;
    this.brief = stoodMs >= STAYED_MS ? 0 : this.brief + 1;
    if (this.brief > BRIEF_FREE)
      delay += jitteredMs(BACKOFF_MIN_MS, TOLD_BACKOFF_MAX_MS, this.brief - BRIEF_FREE - 1, this.chance);
    return delay;
  }
}
