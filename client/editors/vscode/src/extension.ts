// Owns what the extension registers in the editor.

import * as vscode from "vscode";
import { ChatDocuments, MODEL, YOU, participant } from "./chat";
import { Completion } from "./completion";
import { Connection, socketPath } from "./connection";
import { settings } from "./context";
import { Notice, tell } from "./notice";
import { rewrite } from "./rewrite";

export function activate(context: vscode.ExtensionContext): void {
  const connection = new Connection(() => socketPath(settings().get("socket", "")));
  const chats = new ChatDocuments(connection);
  const everywhere: vscode.DocumentSelector = [{ scheme: "file" }, { scheme: "untitled" }];
  const command = (name: string, run: () => unknown): vscode.Disposable =>
    vscode.commands.registerCommand(`mlxbc.${name}`, run);
  context.subscriptions.push(
    connection,
    chats,
    vscode.languages.registerInlineCompletionItemProvider(everywhere, new Completion(connection, new Notice())),
    command("chat", () => chats.open()),
    command("chat.send", () => chats.send()),
    command("rewrite", () => rewrite(connection)),
    command("cancel", () => chats.cancel()),
    command("status", () => status(connection)),
    vscode.window.onDidChangeActiveTextEditor((editor) => {
      const text = editor?.document.languageId === "markdown" ? editor.document.lineAt(0).text : "";
      void vscode.commands.executeCommand("setContext", "mlxbc.chatFocus", text === YOU || text === MODEL);
    }),
  );
  // Editors built on VS Code don't all have its chat.
  if (vscode.chat) {
    context.subscriptions.push(vscode.chat.createChatParticipant("mlxbc.participant", participant(connection)));
  }
}

async function status(connection: Connection): Promise<void> {
  try {
    const report = await connection.request({ type: "status" });
    const models = (report.models ?? []).map((entry) => entry.model).join(", ");
    const line = `${report.state}, ${report.running} running, ${report.queued} queued, ${models}`;
    void vscode.window.showInformationMessage(`mlxbc: ${line}`);
  } catch (error) {
    tell(error);
  }
}
