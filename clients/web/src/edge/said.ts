// What an application says: text, rich text, or bytes of its own type.
import type { MessageInitShape } from "@bufbuild/protobuf";
import { saidBody } from "../core/content";
import { utf8 } from "../core/bytes";
import type { RichSchema } from "../wire/content_pb";

export type MessageInit = string | MessageInitShape<typeof RichSchema> | { msgType: number; body: Uint8Array };

/** [msg_type, body]. */
export function said(message: MessageInit): [number, Uint8Array] {
  if (typeof message === "string") return [0, utf8(message)];
  if ("msgType" in message && "body" in message) return [message.msgType, message.body];
  return saidBody(message);
}
