// Codes of answers, receipts, kicks and closes. The range says what a client does, the frame that carries the code says to
// what; docs/protocol.md §4 has the table, and a test compares it with this file.

export enum Action {
  NONE,
  RETRY,
  RECONNECT,
  LOGIN,
  STOP,
}

export const Code = {
  OK: 0,
  DUPLICATE: 1,
  PENDING: 2,
  BUSY: 100,
  TRY_AGAIN: 101,
  EXPECTED: 102,
  SYNC_FIRST: 103,
  UNAVAILABLE: 104,
  NOT_READY: 105,
  LOGIN_LATER: 106,
  TOO_FAST: 107,
  GATEWAY_FULL: 200,
  SLOW_READER: 201,
  LOGIN_TIMEOUT: 202,
  HEARTBEAT_TIMEOUT: 203,
  GATEWAY_CLOSING: 204,
  SLOT_LOST: 205,
  FLOODING: 206,
  ADDRESS_BUSY: 207,
  LOGIN_FIRST: 300,
  SESSION_UNKNOWN: 301,
  SECRET_WRONG: 302,
  TOKEN_EXPIRED: 303,
  TOKEN_NOT_YET_VALID: 304,
  TOKEN_INVALID: 305,
  GUESTS_OFF: 306,
  MALFORMED: 400,
  FRAME_SIZE: 401,
  REPLACED: 402,
  KICKED: 403,
  LOGGED_OUT: 404,
  FOREIGN_CONN_ID: 405,
  TOO_MANY_DEVICES: 406,
  BAD_CONVERSATION: 420,
  BAD_CLIENT_MSG_ID: 421,
  BAD_CLIENT_ID: 422,
  BODY_TOO_LARGE: 423,
  BAD_TO_USER: 424,
  NOT_A_MEMBER: 425,
  NOT_STORABLE: 426,
  BAD_RANGE: 427,
  TOO_MANY_CURSORS: 428,
  GROUP_EXISTS: 429,
  GROUP_UNKNOWN: 430,
  GROUP_FULL: 431,
  NOT_ALLOWED: 432,
  TOO_LATE: 433,
  BAD_OPERATION: 434,
  MESSAGE_UNKNOWN: 435,
  NOT_WELCOME: 436,
  REFUSED_BY_HOOK: 437,
  ATTACHMENT_UNKNOWN: 438,
} as const;

/** STOP codes up to this one concern the connection, those above it a message or a request. */
export const CONNECTION_STOP_MAX = 419;

/** What a user is told of a code; of one without words here, its number. */
const WORDS: Record<number, string> = {
  [Code.TOKEN_EXPIRED]: "your sign-in has expired",
  [Code.TOKEN_INVALID]: "your sign-in is not accepted here",
  [Code.REPLACED]: "this device is signed in elsewhere",
  [Code.KICKED]: "you were signed out by an administrator",
  [Code.LOGGED_OUT]: "signed out",
  [Code.TOO_MANY_DEVICES]: "you are signed in on too many devices; sign out on one of them first",
  [Code.BODY_TOO_LARGE]: "the message is too long",
  [Code.NOT_A_MEMBER]: "you are no member of this conversation",
  [Code.GROUP_FULL]: "the group has as many members as it may have",
  [Code.GROUP_UNKNOWN]: "there is no such group",
  [Code.NOT_ALLOWED]: "your role in this group does not allow that",
  [Code.TOO_LATE]: "it is too late to change this message",
  [Code.BAD_OPERATION]: "that is not possible",
  [Code.MESSAGE_UNKNOWN]: "there is no such message, or it was recalled",
  [Code.NOT_WELCOME]: "this person takes no messages from you",
  [Code.REFUSED_BY_HOOK]: "the application refused this message",
  [Code.ATTACHMENT_UNKNOWN]: "this file is not there any more",
};

export function text(code: number): string {
  return WORDS[code] ?? `code ${code}`;
}

/** The act for any code, known or not, by its range. Unknown ranges mean STOP. */
export function action(code: number): Action {
  if (code < 100) return Action.NONE;
  if (code < 200) return Action.RETRY;
  if (code < 300) return Action.RECONNECT;
  if (code < 400) return Action.LOGIN;
  return Action.STOP;
}

/** The peer broke the protocol: its frame cannot be read, or holds numbers that no store can keep. */
export class PeerError extends Error {}
