// Group commit: what rounds want written becomes durable in as few transactions as the store allows.
//
// Rounds queue up while a transaction runs; the next one takes all of them, and only then are their effects released, in
// order. A transaction that fails (a full disk) is repeated until it succeeds, and nothing is released meanwhile.
import { type Effects, type Writes, joinWrites, noWrites, writesAny } from "../core/model";

export const REPEAT_MS = 1_000;

export class Writer {
  private queue: Effects[] = [];
  private committing = false;
  private idle: (() => void)[] = [];

  /** failing: told of each failure, null once it works again. */
  constructor(
    private readonly apply: (writes: Writes) => Promise<void>,
    private readonly release: (effects: Effects) => void,
    private readonly failing: (error: unknown) => void,
  ) {}

  put(effects: Effects): void {
    if (this.queue.length === 0 && !writesAny(effects.writes)) {
      this.release(effects);
      return;
    }
    this.queue.push(effects);
    if (!this.committing) void this.commit();
  }

  /** Resolves once nothing is queued. */
  drained(): Promise<void> {
    return this.queue.length === 0 ? Promise.resolve() : new Promise((resolve) => this.idle.push(resolve));
  }

  private async commit(): Promise<void> {
    this.committing = true;
    while (this.queue.length > 0) {
      const count = this.queue.length;
      const writes = noWrites();
      for (const effects of this.queue) joinWrites(writes, effects.writes);
      if (writesAny(writes) && !(await this.written(writes))) {
        await new Promise((resolve) => setTimeout(resolve, REPEAT_MS));
        continue;
      }
      for (const effects of this.queue.splice(0, count)) this.release(effects);
    }
    this.committing = false;
    for (const wake of this.idle.splice(0)) wake();
  }

  private async written(writes: Writes): Promise<boolean> {
    try {
      await this.apply(writes);
      this.failing(null);
      return true;
    } catch (e) {
      this.failing(e);
      return false;
    }
  }
}
