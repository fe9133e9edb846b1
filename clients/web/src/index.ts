// Plato in a browser: see docs/browser.md and docs/embed.md.
export { Client, type ClientOptions, type News } from "./edge/client";
export type { MessageInit } from "./edge/said";
export { alone, type Place as TabPlace } from "./edge/alone";
export { richOf, operationOf, isOperation, quoted, MsgType, Role, type Rich, type Operation, type Attachment, type Quote } from "./core/content";
export { dialogueId, isDialogue, isGroup, isName } from "./core/conversations";
export type { Row, Entry, State, Friend, Phase } from "./core/model";
export type { Thread as Conversation } from "./core/inbox";
export { text as words } from "./core/codes";
export { Api, ApiError } from "./edge/api";
