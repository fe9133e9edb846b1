// The sockets: the one that stands or the attempts at it, and a second one that may take its place. What comes goes to the
// machine with its link's number; what the machine wants sent, opened or closed is done here at once.
import { Code } from "../core/codes";

export interface Listener {
  opened(linkNo: number): boolean;
  frames(linkNo: number, payloads: Uint8Array[]): void;
  /** code: why, where the close's status said so. */
  closed(linkNo: number, code: number | null): void;
}

export class Links {
  private sockets = new Map<number, WebSocket>();
  private first = 0;
  private second = 0;

  constructor(private readonly listener: Listener, private readonly Socket: typeof WebSocket = WebSocket) {}

  /** Begins to open the first link, beside other attempts at it. The first that the machine takes is it. */
  connect(linkNo: number, address: string): void {
    this.open(linkNo, address, () => {
      this.first = linkNo;
    });
  }

  /** Opens the second link; one that stood is closed. */
  connectSecond(linkNo: number, address: string): void {
    this.drop(this.second);
    this.second = linkNo;
    this.open(linkNo, address, () => undefined);
  }

  giveUp(linkNo: number): void {
    this.drop(linkNo);
  }

  /** Sends on the first link, if it is still that one. */
  send(linkNo: number, frames: Uint8Array[]): void {
    if (linkNo === this.first) this.write(linkNo, frames);
  }

  sendSecond(frames: Uint8Array[]): void {
    this.write(this.second, frames);
  }

  /** The second link becomes the first, which is closed. */
  goOver(): void {
    this.drop(this.first);
    this.first = this.second;
    this.second = 0;
  }

  /** Closes the first link, and gives all attempts at it up. */
  close(): void {
    for (const linkNo of [...this.sockets.keys()]) if (linkNo !== this.second) this.drop(linkNo);
    this.first = 0;
  }

  closeSecond(): void {
    this.drop(this.second);
    this.second = 0;
  }

  private open(linkNo: number, address: string, taken: () => void): void {
    let socket: WebSocket;
    try {
      socket = new this.Socket(address);
    } catch {
      queueMicrotask(() => this.listener.closed(linkNo, null)); // no address, or one that the page's policy forbids
      return;
    }
    socket.binaryType = "arraybuffer";
    this.sockets.set(linkNo, socket);
    socket.onopen = () => {
      if (this.sockets.get(linkNo) !== socket) return;
      if (this.listener.opened(linkNo)) taken();
      else this.drop(linkNo);
    };
    socket.onmessage = (event: MessageEvent) => {
      if (this.sockets.get(linkNo) === socket && event.data instanceof ArrayBuffer)
        this.listener.frames(linkNo, [new Uint8Array(event.data)]);
    };
    socket.onclose = (event: CloseEvent) => {
      if (this.sockets.get(linkNo) !== socket) return;
      this.sockets.delete(linkNo);
      this.listener.closed(linkNo, codeOf(event.code));
    };
  }

  private write(linkNo: number, frames: Uint8Array[]): void {
    const socket = this.sockets.get(linkNo);
    if (socket?.readyState !== 1) return;
    for (const frame of frames) socket.send(frame as Uint8Array<ArrayBuffer>);
  }

  private drop(linkNo: number): void {
    const socket = this.sockets.get(linkNo);
    if (!socket) return;
    this.sockets.delete(linkNo);
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }
}

/** What a close's status says of the reason; null: a lost connection like any other. */
export function codeOf(status: number): number | null {
  if (status >= 4000) return status - 4000;
  if (status === 1002 || status === 1003) return Code.MALFORMED;
  return status === 1009 ? Code.FRAME_SIZE : null;
}
