// What is known of a group: what a Sync tells of it holds as of its newestSeq, so the operations up to there are in it already;
// each later one, read in its place, changes it.
import { MsgType, operationOf } from "./content";
import type { Thread } from "./inbox";
import type { Row } from "./model";

/** A group's operation became readable, in its place. False: it is none, or it was known. */
export function operate(thread: Thread, row: Row, user: string | null): boolean {
  const operation = operationOf(row.msgType, row.body);
  if (!operation || row.seq <= thread.groupSeq) return false;
  const { users, title } = operation;
  const me = user !== null && users.includes(user);
  switch (row.msgType) {
    case MsgType.GROUP_CREATE:
      thread.title = title;
      thread.members = new Set([row.fromUser, ...users]).size;
      thread.left = false;
      break;
    case MsgType.GROUP_RENAME:
      thread.title = title;
      break;
    case MsgType.GROUP_ADD:
      thread.members += users.length;
      if (me) [thread.left, thread.members] = [false, 0]; // again: what happened meanwhile only a Sync tells
      break;
    case MsgType.GROUP_REMOVE:
      thread.members = Math.max(0, thread.members - users.length);
      if (me) thread.left = true;
      break;
    case MsgType.GROUP_LEAVE:
      thread.members = Math.max(0, thread.members - 1);
      if (row.fromUser === user) thread.left = true;
      break;
    case MsgType.GROUP_ROLE:
      break;
    default:
      return false;
  }
  thread.groupSeq = row.seq;
  return true;
}

/** A Sync told what holds of a conversation as of newestSeq; where later operations were read, it is older than we are. */
export function told(thread: Thread, item: { title: string; members: number; left: boolean }, newestSeq: number): void {
  if (newestSeq < thread.groupSeq || !(item.title || item.members || item.left)) return;
  thread.title = item.title;
  thread.members = item.members;
  thread.left = item.left;
  thread.groupSeq = newestSeq;
}
