// What a client must ask for before it can connect: its user's token, and the list of gateways. A failure of either is an
// answer (null), never an exception: it is asked again.
import { addressOf } from "../core/moving";
import { fromBase64url, fromUtf8 } from "../core/bytes";
import { isName } from "../core/conversations";

/** Gives the user's token, whenever one is needed: at the first login, and when the last one was refused or expired. */
export type TokenProvider = (fresh: boolean) => Promise<string> | string;

export const TIMEOUT_MS = 2_000;

export class Access {
  private last: string | null = null;

  constructor(private readonly provider: TokenProvider, private readonly ipconfigUrl: string | null) {}

  /** The user's token. fresh: the last one was refused, ask for another. */
  async token(fresh: boolean): Promise<string | null> {
    if (this.last !== null && !fresh) return this.last;
    try {
      this.last = await this.provider(fresh);
    } catch (e) {
      console.warn("plato: no token:", e);
      return null;
    }
    return this.last;
  }

  /** The gateways' WebSocket addresses, best first; null if ipconfig does not answer. A refused token is renewed once. */
  async gateways(): Promise<string[] | null> {
    if (this.ipconfigUrl === null) return null;
    for (const fresh of [false, true]) {
      const token = await this.token(fresh);
      try {
        const headers = token ? { Authorization: `Bearer ${token}` } : undefined;
        const url = `${this.ipconfigUrl.replace(/\/$/, "")}/ip/list`;
        const response = await fetch(url, { headers, signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
        if (response.status === 401 || response.status === 403) continue;
        if (!response.ok) return null;
        return addresses(await response.json(), url.startsWith("https:"));
      } catch {
        return null;
      }
    }
    return null;
  }
}

/** Reads ipconfig's answer; entries that cannot be used are left out. */
export function addresses(answer: unknown, secure: boolean): string[] {
  const data = (answer as { data?: unknown } | null)?.data;
  if (!Array.isArray(data)) return [];
  return data
    .map((entry: { ip?: unknown; ws_port?: unknown } | null) =>
      typeof entry?.ip === "string" && typeof entry.ws_port === "number" ? addressOf(entry.ip, entry.ws_port, secure) : "")
    .filter((address) => address !== "");
}

/** The `sub` of a JWT, unverified: the platform verifies it, we only need to know who we are before the first login. */
export function subject(token: string): string | null {
  try {
    const claims = JSON.parse(fromUtf8(fromBase64url(token.split(".")[1] ?? ""))) as { sub?: unknown };
    return typeof claims.sub === "string" && isName(claims.sub) ? claims.sub : null;
  } catch {
    return null;
  }
}
