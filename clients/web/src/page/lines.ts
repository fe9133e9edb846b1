// Messages in one line, and times as people write them.
import { type Entry, type Row, isName, isOperation, MsgType, operationOf, richOf, Role } from "../index";

/** A message in one line. */
export function summary(said: Row | Entry, me: string): string {
  if ("recalled" in said && said.recalled) return "Message recalled";
  if (isOperation(said.msgType)) return systemLine("fromUser" in said ? said.fromUser : me, said.msgType, said.body, me);
  const rich = richOf(said.msgType, said.body);
  if (!rich) return "Message of another kind";
  if (rich.text) return rich.text;
  const [first] = rich.attachments;
  if (!first) return "";
  return first.mediaType.startsWith("image/") ? "📷 Picture" : `📎 ${first.name}`;
}

/** What an operation did, as a sentence. */
export function systemLine(from: string, msgType: number, body: Uint8Array, me: string): string {
  const who = from === me ? "You" : from;
  const operation = operationOf(msgType, body);
  if (!operation) return `${who} changed the conversation`;
  const others = msgType === MsgType.GROUP_CREATE ? operation.users.filter((u) => u !== from) : operation.users;
  const users = listed(others.map((u) => (u === me ? "you" : u)));
  switch (msgType) {
    case MsgType.GROUP_CREATE:
      return `${who} created the group${operation.title ? ` “${operation.title}”` : ""}${users ? ` with ${users}` : ""}`;
    case MsgType.GROUP_ADD:
      return `${who} added ${users}`;
    case MsgType.GROUP_REMOVE:
      return `${who} removed ${users}`;
    case MsgType.GROUP_LEAVE:
      return `${who} left${operation.owner ? `; ${operation.owner === me ? "you are" : `${operation.owner} is`} the owner now` : ""}`;
    case MsgType.GROUP_RENAME:
      return `${who} renamed the group to “${operation.title}”`;
    case MsgType.GROUP_ROLE:
      return `${who} made ${users} ${["a member", "an administrator", "the owner"][operation.role ?? Role.MEMBER] ?? "something else"}`;
    case MsgType.RECALL:
      return `${who} recalled a message`;
    case MsgType.EDIT:
      return `${who} edited a message`;
    default:
      return `${who} changed the conversation`;
  }
}

function listed(names: string[]): string {
  if (names.length > 4) return `${names.slice(0, 3).join(", ")} and ${names.length - 3} others`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}` : (names[0] ?? "");
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const weekday = new Intl.DateTimeFormat(undefined, { weekday: "short" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const dayAndYear = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", year: "numeric" });
const longDay = new Intl.DateTimeFormat(undefined, { weekday: "long", day: "numeric", month: "long" });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "medium" });

const dayNumber = (ms: number): number => {
  const d = new Date(ms);
  return Math.round(new Date(d.getFullYear(), d.getMonth(), d.getDate()).getTime() / 86_400_000);
};

export const time = (ms: number): string => clock.format(ms);
export const fullTime = (ms: number): string => (ms ? full.format(ms) : "");

/** For the list: the time today, the weekday this week, else the date. */
export function shortTime(ms: number): string {
  if (!ms) return "";
  const days = dayNumber(Date.now()) - dayNumber(ms);
  if (days <= 0) return clock.format(ms);
  if (days === 1) return "Yesterday";
  if (days < 7) return weekday.format(ms);
  return new Date(ms).getFullYear() === new Date().getFullYear() ? day.format(ms) : dayAndYear.format(ms);
}

/** For the line between days. */
export function dayName(ms: number): string {
  const days = dayNumber(Date.now()) - dayNumber(ms);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return new Date(ms).getFullYear() === new Date().getFullYear() ? longDay.format(ms) : dayAndYear.format(ms);
}

export const sameDay = (a: number, b: number): boolean => dayNumber(a) === dayNumber(b);

export function size(bytes: number): string {
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1024 * 1024) return `${Math.round(bytes / 1024)} KB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}

/** Why a file is not even uploaded; "" where it may be. */
export function tooLarge(bytes: number, most: number): string {
  return bytes > most ? `Too large: ${size(bytes)}, and files have at most ${size(most)} here.` : "";
}

/** Why nobody could ever read what is sent to this name; "" where somebody may. */
export function unreachable(name: string): string {
  if (!isName(name)) return "A name has 1 to 64 bytes and no control or invisible characters.";
  return name === "admin" ? "Nobody is called admin: that name is kept for what administrators do." : "";
}

/** One of twelve hues, by name. */
export function hue(name: string): number {
  let sum = 0;
  for (const c of name) sum = (sum * 31 + c.codePointAt(0)!) % 997;
  return (sum % 12) * 30;
}

export function initials(name: string): string {
  const parts = name.trim().split(/[\s._-]+/).filter((p) => p !== "");
  const first = [...(parts[0] ?? "?")][0] ?? "?";
  const second = parts.length > 1 ? ([...parts[parts.length - 1]!][0] ?? "") : "";
  return (first + second).toUpperCase();
}
