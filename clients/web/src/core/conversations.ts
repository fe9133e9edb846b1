// Names of users and conversations, and which are well formed.
import { base64url, compareBytes, concat, utf8 } from "./bytes";
import { sha256 } from "./sha256";
import { plain } from "./visible";

const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;

const prefixed = (bytes: Uint8Array): Uint8Array => concat(Uint8Array.of(bytes.length >> 8, bytes.length & 255), bytes);

/** "d:" + base64url(SHA-256 of both users, sorted by their bytes, each length-prefixed). */
export function dialogueId(a: string, b: string): string {
  const users = [utf8(a), utf8(b)].sort(compareBytes);
  return `d:${base64url(sha256(concat(...users.map(prefixed))))}`;
}

/** The group that `creator` makes by the message of this client_msg_id. */
export function groupId(creator: string, clientMsgId: Uint8Array): string {
  return `g:${base64url(sha256(concat(prefixed(utf8(creator)), clientMsgId)))}`;
}

export const isDialogue = (conversationId: string): boolean => conversationId.startsWith("d:");
export const isGroup = (conversationId: string): boolean => conversationId.startsWith("g:");

/** 1 to 64 bytes of UTF-8, plain: a user_id. */
export function isName(name: string): boolean {
  const size = utf8(name).length;
  return size >= 1 && size <= 64 && !LONE.test(name) && plain(name) === name;
}
