// The client's store: one IndexedDB database per user of this browser, made durable as strictly as the browser can.
//
// `apply` makes one `Writes` durable in one transaction, whole or not at all; calls come one at a time. Reads are
// transactions of their own and see committed rows only. Nothing but messages grows in it.
import {
  type Entry, type Friend, type Hidden, type Place, type Row, type Session, type Snapshot, type Writes,
} from "../core/model";
import { changedRow, goesWith, isSaid } from "../core/content";

export const REFUSED_KEPT = 1_000;
const VERSION = 1;
const TOP = Number.MAX_SAFE_INTEGER;

export interface RefusedEntry {
  entry: Entry;
  code: number;
  /** The hook's words; missing in what an older page stored. */
  detail?: string;
}

/** Where a user's store is kept. */
export const storeName = (user: string): string => `plato:${user}`;

/** A read of a store that was closed, as the client was: its answer interests nobody any more. */
export class StoreClosed extends Error {}

export class Store {
  private closed = false;

  private constructor(private readonly db: IDBDatabase, readonly snapshot: Snapshot) {}

  /** newDeviceId: for a store that has none yet. Rejects when the browser has no room, or keeps no data. */
  static async open(name: string, newDeviceId: string, factory: IDBFactory = indexedDB): Promise<Store> {
    const opening = factory.open(name, VERSION);
    opening.onupgradeneeded = () => {
      const db = opening.result;
      db.createObjectStore("meta");
      db.createObjectStore("conversation", { keyPath: "conversationId" });
      const messages = db.createObjectStore("message", { keyPath: ["conversationId", "seq"] });
      messages.createIndex("msgId", "msgId");
      db.createObjectStore("outbox", { keyPath: ["conversationId", "clientId"] });
      db.createObjectStore("refused", { autoIncrement: true });
      db.createObjectStore("hidden", { keyPath: ["conversationId", "seq"] });
      db.createObjectStore("friend", { keyPath: "user" });
    };
    const db = await answer(opening);
    db.onversionchange = () => db.close(); // a newer page needs another format
    return new Store(db, await load(db, newDeviceId));
  }

  /** Makes `writes` durable. Rejects when nothing was written: repeat it. */
  async apply(writes: Writes): Promise<void> {
    const tx = this.db.transaction([...this.db.objectStoreNames], "readwrite", { durability: "strict" });
    const ended = new Promise<void>((resolve, reject) => {
      tx.oncomplete = () => resolve();
      tx.onabort = () => reject(tx.error ?? new Error("the transaction was given up"));
    });
    const at = (name: string): IDBObjectStore => tx.objectStore(name);
    const write = async (): Promise<void> => {
      for (const row of writes.rows) {
        const known = (await answer(at("message").get([row.conversationId, row.seq]))) as Row | undefined;
        if (!known || row.changedSeq > known.changedSeq) at("message").put(row);
      }
      for (const change of writes.changes) {
        const row = (await answer(at("message").get([change.conversationId, change.seq]))) as Row | undefined;
        if (row) at("message").put(changedRow(row, change));
        if (!change.recalled || change.seq >= change.bySeq) continue;
        const between = IDBKeyRange.bound([change.conversationId, change.seq], [change.conversationId, change.bySeq]);
        for (const edit of (await answer(at("message").getAll(between))) as Row[])
          if (goesWith(edit, change)) at("message").put(changedRow(edit, change));
      }
      for (const place of writes.places.values()) at("conversation").put(place);
      for (const entry of writes.queued.values()) at("outbox").put(entry);
      for (const entry of writes.unqueued) at("outbox").delete([entry.conversationId, entry.clientId]);
      for (const refused of writes.refused) at("refused").add(refused);
      if (writes.forgotten) for (const name of ["hidden", "friend"]) at(name).clear();
      for (const hidden of writes.hidden) at("hidden").put(hidden);
      for (const friend of writes.friends.values()) at("friend").put(friend);
      writes.meta.forEach((value, name) => at("meta").put(value, name));
      if (writes.refused.length > 0) await this.cutRefused(at("refused"));
    };
    try {
      await Promise.all([write(), ended]);
    } catch (e) {
      try {
        tx.abort();
      } catch {
        // it has ended
      }
      throw e;
    }
  }

  /** The newest `limit` messages with seq < before, by rising seq, from the floor on. */
  async history(conversationId: string, before: number, limit: number): Promise<Row[]> {
    const rows: Row[] = [];
    await this.walk(conversationId, 0, before - 1, (row) => rows.push(row) < limit);
    return rows.reverse();
  }

  /** All messages with seq ≥ from, by rising seq. */
  async since(conversationId: string, from: number): Promise<Row[]> {
    const range = IDBKeyRange.bound([conversationId, from], [conversationId, TOP]);
    return (await answer(this.read("message").getAll(range))) as Row[];
  }

  /** Messages for which `wanted` holds, at most `limit`, of at most `most` that are looked at. */
  search(wanted: (row: Row) => boolean, limit: number, most: number): Promise<Row[]> {
    const found: Row[] = [];
    let seen = 0;
    const request = this.read("message").openCursor(null, "prev");
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (cursor && wanted(cursor.value as Row)) found.push(cursor.value as Row);
        seen += 1;
        if (cursor && found.length < limit && seen < most) cursor.continue();
        else resolve(found);
      };
    });
  }

  /** How many of the rows above `after` were said by others and are not hidden, at most `most`. */
  async unread(conversationId: string, after: number, user: string, hidden: Set<number>, most: number): Promise<number> {
    let count = 0;
    await this.walk(conversationId, after + 1, TOP, (row) => {
      if (row.fromUser !== user && isSaid(row.msgType) && !row.recalled && !hidden.has(row.seq)) count += 1;
      return count < most;
    });
    return count;
  }

  /** The stored message of this msg_id. */
  async byMsgId(msgId: string): Promise<Row | undefined> {
    return (await answer(this.read("message").index("msgId").get(msgId))) as Row | undefined;
  }

  async row(conversationId: string, seq: number): Promise<Row | undefined> {
    return (await answer(this.read("message").get([conversationId, seq]))) as Row | undefined;
  }

  /** The seqs of a conversation that were deleted for this user only. */
  async hidden(conversationId: string): Promise<Set<number>> {
    const range = IDBKeyRange.bound([conversationId, 0], [conversationId, TOP]);
    return new Set(((await answer(this.read("hidden").getAll(range))) as Hidden[]).map((h) => h.seq));
  }

  /** The refused messages of a conversation with their codes, oldest first; the newest 1,000 of all are kept. */
  async refused(conversationId: string): Promise<RefusedEntry[]> {
    const all = (await answer(this.read("refused").getAll())) as RefusedEntry[];
    return all.filter((r) => r.entry.conversationId === conversationId);
  }

  close(): void {
    this.closed = true;
    this.db.close();
  }

  /** Rows of a range, the newest first, until `visit` says that it has enough. */
  private walk(conversationId: string, from: number, to: number, visit: (row: Row) => boolean): Promise<void> {
    if (to < from) return Promise.resolve();
    const range = IDBKeyRange.bound([conversationId, from], [conversationId, to]);
    const request = this.read("message").openCursor(range, "prev");
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (cursor && visit(cursor.value as Row)) cursor.continue();
        else resolve();
      };
    });
  }

  private read(name: string): IDBObjectStore {
    if (this.closed) throw new StoreClosed("the store is closed");
    return this.db.transaction(name, "readonly").objectStore(name);
  }

  private async cutRefused(refused: IDBObjectStore): Promise<void> {
    const keys = await answer(refused.getAllKeys());
    for (const key of keys.slice(0, Math.max(0, keys.length - REFUSED_KEPT))) refused.delete(key);
  }
}

/** The answer of one request; rejects with its error. */
export function answer<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function load(db: IDBDatabase, newDeviceId: string): Promise<Snapshot> {
  const tx = db.transaction(["meta", "conversation", "outbox", "friend"], "readwrite", { durability: "strict" });
  const meta = tx.objectStore("meta");
  const text = async (name: string): Promise<string | null> => ((await answer(meta.get(name))) as string | undefined) || null;
  const deviceId = (await text("deviceId")) ?? newDeviceId;
  meta.put(deviceId, "deviceId");
  const sessionText = await text("session");
  const [connId, secret] = (sessionText ?? "").split(" ");
  const session: Session | null = connId && secret !== undefined ? { connId, secret } : null;
  const snapshot: Snapshot = {
    deviceId,
    user: await text("user"),
    session,
    gateways: ((await text("gateways")) ?? "").split("\n").filter((a) => a !== ""),
    lastGateway: await text("lastGateway"),
    stateVersion: BigInt((await text("stateVersion")) ?? "0"),
    places: (await answer(tx.objectStore("conversation").getAll())) as Place[],
    outbox: (await answer(tx.objectStore("outbox").getAll())) as Entry[], // by (conversationId, clientId)
    friends: (await answer(tx.objectStore("friend").getAll())) as Friend[],
  };
  return snapshot;
}
