// What a body holds: text, rich text, and the operations that change a conversation.
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { fromUtf8, utf8 } from "./bytes";
import type { Change, Row } from "./model";
import { plain } from "./visible";
import { clipped } from "./wire";
import { MsgType, type Operation, OperationSchema, type Quote, QuoteSchema, type Rich, RichSchema } from "../wire/content_pb";

export { MsgType, Role } from "../wire/content_pb";
export type { Attachment, Operation, Quote, Rich } from "../wire/content_pb";

export const isOperation = (msgType: number): boolean => msgType >= 1000 && msgType < 2000;
/** Whether it counts as something to read. */
export const isSaid = (msgType: number): boolean => !isOperation(msgType);

export const operationBody = (init: MessageInitShape<typeof OperationSchema>): Uint8Array =>
  toBinary(OperationSchema, create(OperationSchema, init));

export const quoted = (init: MessageInitShape<typeof QuoteSchema>): Quote => create(QuoteSchema, init);

/** [msg_type, body] of what a person says: plain text where that is all. */
export function saidBody(init: MessageInitShape<typeof RichSchema>): [number, Uint8Array] {
  const rich = create(RichSchema, init);
  for (const attachment of rich.attachments) attachment.name = plain(attachment.name); // else the platform refuses it
  if (!rich.reply && rich.attachments.length === 0 && rich.mentions.length === 0) return [MsgType.TEXT, utf8(rich.text)];
  return [MsgType.RICH, toBinary(RichSchema, rich)];
}

/** null: it is no operation, or cannot be read. */
export function operationOf(msgType: number, body: Uint8Array): Operation | null {
  if (!isOperation(msgType)) return null;
  try {
    return fromBinary(OperationSchema, body);
  } catch {
    return null;
  }
}

/** What is said, as rich text. null: an application's own type, an operation, or bytes that cannot be read. */
export function richOf(msgType: number, body: Uint8Array): Rich | null {
  if (msgType === MsgType.TEXT) return create(RichSchema, { text: fromUtf8(body) });
  if (msgType !== MsgType.RICH) return null;
  try {
    return fromBinary(RichSchema, body);
  } catch {
    return null;
  }
}

/** What a RECALL or EDIT does to an older row; null: this row changes none. */
export function changeOf(row: Row): Change | null {
  if (row.msgType !== MsgType.RECALL && row.msgType !== MsgType.EDIT) return null;
  const operation = operationOf(row.msgType, row.body);
  if (!operation || operation.seq === 0n) return null;
  const recalled = row.msgType === MsgType.RECALL;
  return {
    conversationId: row.conversationId,
    msgId: operation.msgId.toString(),
    seq: clipped(operation.seq),
    bySeq: row.seq,
    recalled,
    msgType: recalled ? MsgType.TEXT : operation.msgType,
    body: recalled ? new Uint8Array() : operation.body,
  };
}

/** Whether the row is an EDIT of the message that this RECALL takes back: what it said goes too. */
export function goesWith(row: Row, change: Change): boolean {
  if (!change.recalled || row.msgType !== MsgType.EDIT || row.recalled) return false;
  return operationOf(row.msgType, row.body)?.msgId.toString() === change.msgId;
}

/** The row after the change; the same row where it shows that change already. */
export function changedRow(row: Row, change: Change): Row {
  if (row.changedSeq >= change.bySeq || row.recalled) return row;
  const { recalled, msgType, body } = change;
  return { ...row, recalled, body, msgType: recalled ? row.msgType : msgType, changedSeq: change.bySeq };
}
