// Which gateway next: the one that served last, if it is still listed, then the list's own order, best first. A round tries
// each address once; after it the caller waits with back-off and looks the list up again.
import type { Chance } from "./timing";

export class Gateways {
  private avoided: string | null = null;
  private round: string[] = [];

  /** given: addresses that the application named. listed: the last list heard, best first. */
  constructor(private readonly given: string[], public listed: string[], public last: string | null) {}

  /** Every address, the last list's first. */
  get known(): string[] {
    return [...new Set([...this.listed, ...this.given])];
  }

  /** This gateway is closing, full or dead: in the next round it comes after the others. */
  avoid(address: string | null): void {
    this.avoided = address;
  }

  /** Orders the addresses for one round. listed: a fresh list; null: there is none, the last one and the given ones serve. */
  beginRound(listed: string[] | null, chance: Chance): void {
    let order: string[];
    if (listed && listed.length > 0) {
      this.listed = [...listed];
      order = [...listed];
    } else {
      const at = Math.floor(chance() * this.given.length);
      order = [...new Set([...this.listed, ...this.given.slice(at), ...this.given.slice(0, at)])];
    }
    const { last, avoided } = this;
    if (last !== null && order.includes(last)) order = [last, ...order.filter((a) => a !== last)];
    if (avoided !== null && order.includes(avoided)) order = [...order.filter((a) => a !== avoided), avoided];
    this.avoided = null;
    this.round = order;
  }

  /** The next address of this round; undefined: all were tried. */
  take(): string | undefined {
    return this.round.shift();
  }

  get left(): number {
    return this.round.length;
  }

  /** These were taken and given up for another: they come first in what is left of this round. */
  putBack(addresses: string[]): void {
    this.round.unshift(...addresses);
  }

  /** A session was committed through this address. True: it is another one than before. */
  served(address: string): boolean {
    const changed = address !== this.last;
    this.last = address;
    return changed;
  }
}
