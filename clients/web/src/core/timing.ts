// What the platform tells at login, with defaults until then, and the back-offs that follow from it. Milliseconds.

/** Gives [0, 1): the caller's source of jitter. */
export type Chance = () => number;

/** First back-off after an answer "later": who answers is alive, so this is shorter than the repeat of what is unanswered. */
export const LATER_MIN_MS = 250;
/** No told time is waited for longer: a platform that says more is mistaken. */
export const RETRY_MAX_MS = 600_000;

export interface Told {
  heartbeatMs: number;
  reconnectDelayMs: number;
  repeatMinMs: number;
  repeatMaxMs: number;
  maxBodyBytes: number;
  connectDelayMs: number;
  connectTimeoutMs: number;
}

export class Timing {
  heartbeatMs = 30_000;
  reconnectDelayMs = 1_000;
  repeatMinMs = 2_000;
  repeatMaxMs = 30_000;
  maxBodyBytes = 61_440;
  connectDelayMs = 250;
  connectTimeoutMs = 5_000;

  /** Takes over what the answer to Login or ReConn told. 0 tells nothing; but beside an interval a delay of 0 is a time, too. */
  tune(told: Told): void {
    if (told.heartbeatMs || told.reconnectDelayMs) this.reconnectDelayMs = told.reconnectDelayMs;
    this.heartbeatMs = told.heartbeatMs || this.heartbeatMs;
    this.repeatMinMs = told.repeatMinMs || this.repeatMinMs;
    this.repeatMaxMs = Math.max(told.repeatMaxMs || this.repeatMaxMs, this.repeatMinMs);
    this.maxBodyBytes = told.maxBodyBytes || this.maxBodyBytes;
    this.connectDelayMs = told.connectDelayMs || this.connectDelayMs;
    this.connectTimeoutMs = told.connectTimeoutMs || this.connectTimeoutMs;
  }

  backoffMs(times: number, chance: Chance): number {
    return jitteredMs(this.repeatMinMs, this.repeatMaxMs, times, chance);
  }

  laterMs(times: number, chance: Chance): number {
    return jitteredMs(Math.min(LATER_MIN_MS, this.repeatMaxMs), this.repeatMaxMs, times, chance);
  }
}

/** first × 2^times, at most `most`, less up to a quarter by chance; at least 1. */
export function jitteredMs(firstMs: number, mostMs: number, times: number, chance: Chance): number {
  return Math.max(1, Math.floor(Math.min(mostMs, firstMs * 2 ** Math.min(times, 20)) * (1 - chance() / 4)));
}

export const soonest = (...moments: (number | null)[]): number | null =>
  moments.reduce((best, m) => (m === null ? best : best === null ? m : Math.min(best, m)), null);
