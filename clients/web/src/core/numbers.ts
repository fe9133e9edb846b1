// (run, push_no) of one connection: what came, what may be acknowledged, when only a Sync can tell what was lost (R4).
//
// push_no is consecutive within a run. A jump, or a greater run, means that frames may have been lost: a Sync is due, and
// nothing from there on is acknowledged before that Sync and the pulls it asked for are stored. A frame whose content could
// not be stored yet (its conversation has a gap) holds the acknowledgement below itself. Memory: one number per such
// conversation.

export type Arrival = "next" | "repeat" | "stale" | "jump";

const SYNC = ""; // no conversation has an empty id

export class PushLine {
  run = 0n;
  private seen = 0;
  private holds = new Map<string, number>(); // conversation (or SYNC) → first push_no that it keeps back
  private told: [bigint, number] = [0n, 0];
  private tellAgain = false;

  /** A numbered frame came; its content is handled by the caller, save for "stale". */
  arrive(run: bigint, pushNo: number): Arrival {
    if (run < this.run) return "stale";
    if (run > this.run) {
      this.begin(run, pushNo);
      return "jump";
    }
    if (pushNo <= this.seen) {
      this.tellAgain = true;
      return "repeat";
    }
    const jumped = pushNo > this.seen + 1;
    if (jumped) this.setHold(SYNC, this.seen + 1);
    this.seen = pushNo;
    return jumped ? "jump" : "next";
  }

  /** The platform's newest numbers by another frame. True: something was lost, Sync. */
  hint(run: bigint, pushNo: number): boolean {
    if (run < this.run || (run === this.run && pushNo <= this.seen)) return false;
    if (run > this.run) this.begin(run, pushNo);
    else {
      this.setHold(SYNC, this.seen + 1);
      this.seen = pushNo;
    }
    return true;
  }

  /**
   * The numbers at the commit. The Sync that committed reads after them, so it covers whatever came before: no jump. What
   * came numbered ahead of this answer keeps its hold until that Sync ends.
   */
  adopt(run: bigint, pushNo: number): void {
    if (run > this.run) {
      this.run = run;
      this.seen = pushNo;
      this.holds.clear();
    } else if (run === this.run) this.seen = Math.max(this.seen, pushNo);
  }

  /** The newest frame asked for a Sync: it is acknowledged when that has ended. */
  syncDue(): void {
    this.setHold(SYNC, this.seen);
  }

  /** The Sync ended; `behind` are the conversations that it, or a push, left with a gap: they keep holding. */
  synced(behind: string[]): void {
    const first = this.holds.get(SYNC);
    if (first === undefined) return;
    this.holds.delete(SYNC);
    for (const conversationId of behind) this.setHold(conversationId, first);
  }

  /** The newest frame's content waits for a pull of this conversation. */
  hold(conversationId: string): void {
    this.setHold(conversationId, this.seen);
  }

  /** This conversation has no gap any more. */
  release(conversationId: string): void {
    this.holds.delete(conversationId);
  }

  /** The newest (run, push_no) up to which everything is stored, or will be by the writes of this round. */
  get stored(): [bigint, number] {
    const free = this.holds.size === 0 ? this.seen : Math.min(this.seen, Math.min(...this.holds.values()) - 1);
    return [this.run, free];
  }

  /** What to acknowledge now, if it is news or was asked for again. */
  acknowledgement(): [bigint, number] | null {
    const stored = this.stored;
    const [toldRun, toldNo] = this.told;
    const newer = stored[0] > toldRun || (stored[0] === toldRun && stored[1] > toldNo);
    const newest = newer ? stored : this.told;
    if (newest[1] === 0 || (!newer && !this.tellAgain)) return null;
    this.told = newest;
    this.tellAgain = false;
    return newest;
  }

  /** A greater run: its frames before this one may be lost; old holds now hold the new run from its start. */
  private begin(run: bigint, pushNo: number): void {
    this.run = run;
    this.seen = pushNo;
    for (const key of this.holds.keys()) this.holds.set(key, 1);
    this.holds.set(SYNC, 1);
    this.tellAgain = false;
  }

  private setHold(key: string, pushNo: number): void {
    const first = Math.max(1, pushNo);
    this.holds.set(key, Math.min(first, this.holds.get(key) ?? first));
  }
}
