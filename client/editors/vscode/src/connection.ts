// Owns the connection to the daemon: one socket, one JSON object a line, many requests at once.
//
// It opens with the first request, and again with the first one after it was lost.

import * as fs from "node:fs";
import * as net from "node:net";
import * as os from "node:os";
import * as path from "node:path";

/** A message of the daemon; its fields are those of the wire's Structs. */
export interface Reply {
  type: string;
  id?: number;
  text?: string;
  channel?: string;
  reason?: string;
  code?: string;
  message?: string;
  phase?: string;
  done?: number;
  total?: number;
  state?: string;
  running?: number;
  queued?: number;
  models?: { model: string }[];
}

/** What ends a request: vscode's CancellationToken, or anything like it. */
export interface Cancellation {
  readonly isCancellationRequested: boolean;
  onCancellationRequested(listener: () => void): { dispose(): unknown };
}

/** Why a request has no result. `code` is the wire's, or `absent`, `connection_lost` or `cancelled`. */
export class Trouble extends Error {
  constructor(
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

export const ABSENT = "no daemon is running; start one with: mlxbc serve --detach";
const LOST = "the connection to the daemon ended before the request did; ask again";
const TERMINAL = new Set(["done", "error", "status_report"]);

interface Call {
  hear(reply: Reply): void;
  fail(trouble: Trouble): void;
}

interface Link {
  socket: net.Socket;
  calls: Map<number, Call>;
  rest: string;
  greeted: boolean;
}

/** The daemon's socket, as the `mlxbc` command finds it. */
export function socketPath(setting = ""): string {
  const chosen = setting || process.env["MLXBC_SOCKET"] || "";
  if (chosen) {
    return path.resolve(chosen.replace(/^~(?=\/|$)/, os.homedir()));
  }
  if (process.platform === "darwin") {
    return path.join(os.homedir(), "Library/Application Support/mlxbc/mlxbc.sock");
  }
  const uid = process.getuid?.() ?? 0;
  const places = [
    process.env["XDG_RUNTIME_DIR"],
    `/run/user/${uid}`,
    `${process.env["TMPDIR"] || "/tmp"}/runtime-${uid}`,
  ].flatMap((place) => (place ? [path.join(place, "mlxbc/mlxbc.sock")] : []));
  return places.find((place) => fs.existsSync(place)) ?? places[0]!;
}

export class Connection {
  private link: Link | undefined;
  private lastId = 0;

  /** @param where finds the socket, each time anew. */
  constructor(private readonly where: () => string) {}

  /**
   * Sends a request without its id and waits for its last message.
   *
   * A request that the daemon never began to answer because it was restarted is sent once more.
   *
   * @param hear is called with every message before the last.
   * @throws Trouble if the daemon isn't there, refuses or fails, or the request was cancelled.
   */
  async request(message: object, hear: (reply: Reply) => void = () => {}, cancellation?: Cancellation): Promise<Reply> {
    for (let again = true; ; again = false) {
      const known = this.link?.greeted ?? false;
      let heard = false;
      try {
        return await this.once(
          message,
          (reply) => {
            heard = true;
            hear(reply);
          },
          cancellation,
        );
      } catch (trouble) {
        const stale = trouble instanceof Trouble && trouble.code === "connection_lost" && known && !heard;
        if (!stale || !again) {
          throw trouble;
        }
      }
    }
  }

  private once(message: object, hear: (reply: Reply) => void, cancellation?: Cancellation): Promise<Reply> {
    return new Promise((resolve, reject) => {
      if (cancellation?.isCancellationRequested) {
        reject(new Trouble("cancelled", "cancelled"));
        return;
      }
      const link = this.link ?? this.open();
      const id = ++this.lastId;
      const watching = cancellation?.onCancellationRequested(() => {
        if (link.calls.delete(id)) {
          write(link, { type: "cancel", id });
          watching?.dispose();
          reject(new Trouble("cancelled", "cancelled"));
        }
      });
      link.calls.set(id, {
        hear(reply) {
          if (!TERMINAL.has(reply.type)) {
            hear(reply);
            return;
          }
          link.calls.delete(id);
          watching?.dispose();
          if (reply.type === "error") {
            reject(new Trouble(reply.code ?? "internal", reply.message ?? "the daemon failed"));
          } else {
            resolve(reply);
          }
        },
        fail(trouble) {
          watching?.dispose();
          reject(trouble);
        },
      });
      write(link, { ...message, id });
    });
  }

  private open(): Link {
    const where = this.where();
    const socket = new net.Socket();
    const link: Link = { socket, calls: new Map(), rest: "", greeted: false };
    this.link = link;
    let trouble = new Trouble("connection_lost", LOST);
    socket.setEncoding("utf8");
    socket.on("data", (text: string) => {
      const lines = (link.rest + text).split("\n");
      link.rest = lines.pop()!;
      for (const line of lines) {
        const reply = parse(line);
        if (!reply) {
          trouble = new Trouble("proto_mismatch", "cannot read what the daemon says; install one version of both");
          socket.destroy();
          return;
        }
        if (reply.id !== undefined) {
          link.calls.get(reply.id)?.hear(reply);
        } else if (reply.type === "welcome") {
          link.greeted = true;
        } else if (reply.type === "error") {
          trouble = new Trouble(reply.code ?? "internal", reply.message ?? LOST);
          socket.destroy();
        }
      }
    });
    socket.on("error", (error: NodeJS.ErrnoException) => {
      if (error.syscall === "connect") {
        trouble = new Trouble("absent", ABSENT);
      }
    });
    // The daemon's end is the end: what is still written would go nowhere.
    socket.on("end", () => socket.destroy());
    socket.on("close", () => {
      if (this.link === link) {
        this.link = undefined;
      }
      const calls = [...link.calls.values()];
      link.calls.clear();
      calls.forEach((call) => call.fail(trouble));
    });
    const stat = fs.statSync(where, { throwIfNoEntry: false });
    if (stat && stat.uid !== process.getuid?.()) {
      trouble = new Trouble("absent", `the socket ${where} is another user's; set mlxbc.socket to your own`);
      socket.destroy();
    } else {
      socket.connect(where);
    }
    write(link, { type: "hello", proto: 1, client: "mlxbc-vscode" });
    return link;
  }

  /** Ends the connection; the daemon cancels what still runs on it. */
  dispose(): void {
    for (const id of this.link?.calls.keys() ?? []) {
      write(this.link!, { type: "cancel", id });
    }
    this.link?.socket.destroySoon();
  }
}

function parse(line: string): Reply | undefined {
  try {
    return JSON.parse(line) as Reply;
  } catch {
    return undefined;
  }
}

function write(link: Link, message: object): void {
  if (!link.socket.destroyed) {
    link.socket.write(`${JSON.stringify(message)}\n`);
  }
}

/** Text that JSON can carry as UTF-8: half a surrogate pair is not Unicode. */
export function unicode(text: string): string {
  return text.replace(/[\uD800-\uDBFF](?![\uDC00-\uDFFF])|(?<![\uD800-\uDBFF])[\uDC00-\uDFFF]/g, "\uFFFD");
}

/** The text of a reply, if it is a token of the answer itself. */
export function token(reply: Reply): string {
  return reply.type === "token" && (reply.channel ?? "text") === "text" ? (reply.text ?? "") : "";
}

/** How far the daemon is, as a reply tells; empty if it doesn't. */
export function progress(reply: Reply): string {
  if (reply.type === "accepted") {
    return "waiting";
  }
  if (reply.type === "progress") {
    const share = Math.round((100 * (reply.done ?? 0)) / Math.max(1, reply.total ?? 0));
    return `${reply.phase === "load" ? "loading the model" : "reading"}, ${share} %`;
  }
  return reply.type === "token" && reply.channel === "reasoning" ? "thinking" : "";
}
