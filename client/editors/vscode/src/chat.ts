// Owns chatting: as @mlxbc in the chat view, and in a document. The document is the conversation: what stands under its
// headings is what the model is sent.

import * as vscode from "vscode";
import { Connection, progress, token } from "./connection";
import { chatRequest, settings } from "./context";
import { tell, text } from "./notice";

export const YOU = "─── you ───";
export const MODEL = "─── mlxbc ───";

interface Message {
  role: string;
  content: string;
}

/** The messages under the headings, in order. A turn without text is left out. */
export function conversation(document: string): Message[] {
  const messages: Message[] = [];
  let current: { role: string; lines: string[] } | undefined;
  for (const line of [...document.split(/\r?\n/), YOU]) {
    if (line === YOU || line === MODEL) {
      const content = current?.lines.join("\n").trim();
      if (current && content) {
        messages.push({ role: current.role, content });
      }
      current = { role: line === YOU ? "user" : "assistant", lines: [] };
    } else {
      current?.lines.push(line);
    }
  }
  return messages;
}

function withSystem(messages: Message[]): Message[] {
  const system = settings().get("chat.system", "");
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** Answers in the chat view. */
export function participant(connection: Connection): vscode.ChatRequestHandler {
  return async (request, context, stream, cancellation) => {
    const messages = context.history.flatMap((turn): Message[] => {
      if ("prompt" in turn) {
        return [{ role: "user", content: turn.prompt }];
      }
      const content = turn.response
        .map((part) => (part instanceof vscode.ChatResponseMarkdownPart ? part.value.value : ""))
        .join("");
      return content ? [{ role: "assistant", content }] : [];
    });
    try {
      await connection.request(
        chatRequest(withSystem([...messages, { role: "user", content: request.prompt }])),
        (reply) => {
          const said = token(reply);
          if (said) {
            stream.markdown(said);
          } else if (progress(reply)) {
            stream.progress(progress(reply));
          }
        },
        cancellation,
      );
      return {};
    } catch (error) {
      return cancellation.isCancellationRequested ? {} : { errorDetails: { message: text(error) } };
    }
  };
}

/** The conversations in documents. */
export class ChatDocuments implements vscode.Disposable {
  private readonly running = new Map<vscode.TextDocument, vscode.CancellationTokenSource>();

  constructor(private readonly connection: Connection) {}

  async open(): Promise<void> {
    const document = await vscode.workspace.openTextDocument({ language: "markdown", content: `${YOU}\n` });
    const editor = await vscode.window.showTextDocument(document, vscode.ViewColumn.Beside);
    const end = document.lineAt(document.lineCount - 1).range.end;
    editor.selection = new vscode.Selection(end, end);
  }

  /** Sends the conversation of the active editor, and writes the answer below it. */
  async send(): Promise<void> {
    const document = vscode.window.activeTextEditor?.document;
    const messages = document ? conversation(document.getText()) : [];
    if (!document || messages.at(-1)?.role !== "user") {
      void vscode.window.showWarningMessage("mlxbc: write your message below the last heading of a chat first");
      return;
    }
    if (this.running.has(document)) {
      void vscode.window.showWarningMessage("mlxbc: an answer is being written; wait, or end it");
      return;
    }
    const source = new vscode.CancellationTokenSource();
    this.running.set(document, source);
    const writer = new Writer(document);
    writer.write(`\n\n${MODEL}\n`);
    let remark: vscode.Disposable | undefined;
    const say = (now: string): void => {
      remark?.dispose();
      remark = now ? vscode.window.setStatusBarMessage(`mlxbc: ${now}`) : undefined;
    };
    try {
      await this.connection.request(
        chatRequest(withSystem(messages)),
        (reply) => {
          say(progress(reply));
          writer.write(token(reply));
        },
        source.token,
      );
    } catch (error) {
      tell(error);
    } finally {
      say("");
      writer.write(`\n\n${YOU}\n`);
      await writer.written;
      this.running.delete(document);
      source.dispose();
    }
  }

  /** Ends the answers that are being written; what came of them stays. */
  cancel(): void {
    this.running.forEach((source) => source.cancel());
  }

  dispose(): void {
    this.cancel();
  }
}

/** Appends to a document: one edit at a time, with everything that came meanwhile. */
class Writer {
  written: Promise<void> = Promise.resolve();
  private waiting = "";

  constructor(private readonly document: vscode.TextDocument) {}

  write(text: string): void {
    if (text && !this.waiting) {
      this.written = this.written.then(() => this.flush());
    }
    this.waiting += text;
  }

  private async flush(): Promise<void> {
    const text = this.waiting;
    this.waiting = "";
    const edit = new vscode.WorkspaceEdit();
    edit.insert(this.document.uri, this.document.lineAt(this.document.lineCount - 1).range.end, text);
    await vscode.workspace.applyEdit(edit);
  }
}
