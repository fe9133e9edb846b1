// The HTTP API of msg, as a page needs it: attachments, search, members, and what is set of a conversation. docs/http-api.md.
import { create } from "@bufbuild/protobuf";
import { type Attachment, AttachmentSchema } from "../wire/content_pb";

export interface Member {
  user: string;
  role: "member" | "administrator" | "owner";
}

export interface Group {
  title: string;
  owner: string;
  members: number;
  role: Member["role"];
  left: boolean;
}

/** A message as the API shows it. */
export interface Found {
  msg_id: string;
  conversation_id: string;
  seq: number;
  from: string;
  server_at: number;
  text?: string;
  recalled: boolean;
}

/** A refusal, in its own words. code: of docs/protocol.md §4, 0 where none was told; status 0: nobody answered. */
export class ApiError extends Error {
  constructor(readonly status: number, readonly code: number, words: string) {
    super(words);
  }

  /** The platform does not have this (yet). */
  get missing(): boolean {
    return this.status === 0 || this.status === 501 || (this.status === 404 && this.code === 0);
  }
}

export class Api {
  /** urls: of msg processes, tried in turn. token: the user's; fresh after one was refused. */
  constructor(private readonly urls: string[], private readonly token: (fresh: boolean) => Promise<string | null>) {}

  members(conversationId: string, after = ""): Promise<{ members: Member[]; more: boolean }> {
    return this.json("GET", `/v1/groups/${encodeURIComponent(conversationId)}/members?limit=100&after=${encodeURIComponent(after)}`);
  }

  group(conversationId: string): Promise<Group> {
    return this.json("GET", `/v1/groups/${encodeURIComponent(conversationId)}`);
  }

  pin(conversationId: string, pinned: boolean): Promise<unknown> {
    return this.json("PUT", `${one(conversationId)}/pin`, { pinned });
  }

  /** Until it is lifted, or not. */
  mute(conversationId: string, muted: boolean): Promise<unknown> {
    return this.json("PUT", `${one(conversationId)}/mute`, muted ? {} : { until: 0 });
  }

  /** Deletes a conversation from this user's list, and its messages for this user. */
  clear(conversationId: string): Promise<unknown> {
    return this.json("DELETE", one(conversationId));
  }

  /** Deletes a message for this user only. */
  hide(msgId: string): Promise<unknown> {
    return this.json("DELETE", `/v1/messages/${msgId}?for=me`);
  }

  readers(conversationId: string, seq: number): Promise<{ users: string[]; more: boolean }> {
    return this.json("GET", `${one(conversationId)}/readers?seq=${seq}`);
  }

  async presence(users: string[]): Promise<Record<string, boolean>> {
    const query = users.map((user) => `users=${encodeURIComponent(user)}`).join("&");
    return (await this.json<{ online: Record<string, boolean> }>("GET", `/v1/presence?${query}`)).online;
  }

  /** Messages of this user's conversations that hold these words, the newest first. */
  async search(words: string): Promise<Found[]> {
    const found = await this.json<{ messages?: Found[]; results?: Found[] }>("GET", `/v1/search?q=${encodeURIComponent(words)}&limit=30`);
    return found.messages ?? found.results ?? [];
  }

  block(user: string, blocked: boolean): Promise<unknown> {
    return this.json("POST", `/v1/friends/${encodeURIComponent(user)}/${blocked ? "block" : "unblock"}`);
  }

  /** Uploads a file; what a message then names. */
  async upload(file: Blob, name: string): Promise<Attachment> {
    const headers = { "Content-Type": file.type || "application/octet-stream" };
    const response = await this.ask("POST", `/v1/attachments?name=${encodeURIComponent(name)}`, file, headers);
    const said = (await response.json()) as Record<string, unknown>;
    return create(AttachmentSchema, {
      attachmentId: String(said.attachment_id),
      name: String(said.name ?? name),
      mediaType: String(said.media_type ?? file.type),
      sizeBytes: BigInt(Number(said.size_bytes ?? file.size)),
      width: Number(said.width ?? 0),
      height: Number(said.height ?? 0),
      thumbnail: Boolean(said.thumbnail),
    });
  }

  /** A file that a message names, or its thumbnail. */
  async fetch(attachmentId: string, thumbnail: boolean): Promise<Blob> {
    const path = `/v1/attachments/${encodeURIComponent(attachmentId)}${thumbnail ? "/thumbnail" : ""}`;
    return (await this.ask("GET", path)).blob();
  }

  private async json<T>(method: string, path: string, body?: unknown): Promise<T> {
    const headers: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
    const response = await this.ask(method, path, body === undefined ? undefined : JSON.stringify(body), headers);
    return (await response.json()) as T;
  }

  /** The answer, of the first msg process that gives one. Throws ApiError. */
  private async ask(method: string, path: string, body?: BodyInit, headers: Record<string, string> = {}): Promise<Response> {
    let refused = new ApiError(0, 0, "the server cannot be reached; try again");
    let fresh = false;
    for (let at = 0; at < this.urls.length; at++) {
      const token = await this.token(fresh);
      let response: Response;
      try {
        const all = { ...headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
        response = await fetch(this.urls[at]! + path, { method, body, headers: all });
      } catch {
        continue; // nobody there: the next one
      }
      if (response.ok) return response;
      refused = await problem(response);
      if (response.status === 401 && !fresh) {
        fresh = true;
        at -= 1;
      } else if (response.status < 502) break;
    }
    throw refused;
  }
}

const one = (conversationId: string): string => `/v1/conversations/${encodeURIComponent(conversationId)}`;

async function problem(response: Response): Promise<ApiError> {
  try {
    const said = (await response.json()) as { code?: unknown; detail?: unknown; title?: unknown };
    return new ApiError(response.status, Number(said.code ?? 0) || 0, String(said.detail || said.title || `status ${response.status}`));
  } catch {
    return new ApiError(response.status, 0, `status ${response.status}`);
  }
}
