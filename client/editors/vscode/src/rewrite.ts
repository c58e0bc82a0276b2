// Owns rewriting a selection: an instruction and the text go out, the answer takes the text's place.

import * as vscode from "vscode";
import { Connection, progress, token } from "./connection";
import { chatRequest } from "./context";
import { tell } from "./notice";

const SYSTEM =
  "You edit text. You are given an instruction and a text. Answer with the edited text alone: no explanation, no code " +
  "fence, the same indentation.";

/** An answer without the code fence that models like to put around it. */
export function bare(answer: string): string {
  const text = answer.replace(/^\s*\n/, "").trimEnd();
  const fenced = /^\s*```[^\n]*\n([\s\S]*?)\n?[ \t]*```$/.exec(text);
  return fenced ? fenced[1]! : text;
}

export async function rewrite(connection: Connection): Promise<void> {
  const editor = vscode.window.activeTextEditor;
  if (!editor || editor.selection.isEmpty) {
    void vscode.window.showWarningMessage("mlxbc: select the text to rewrite first");
    return;
  }
  const { document } = editor;
  const selection = new vscode.Range(editor.selection.start, editor.selection.end);
  const before = document.getText(selection);
  const instruction = await vscode.window.showInputBox({ prompt: "Rewrite how?", placeHolder: "add a docstring" });
  if (!instruction) {
    return;
  }
  const newline = /\r?\n$/.exec(before)?.[0] ?? "";
  const content = `Instruction: ${instruction}\n\nText, from ${vscode.workspace.asRelativePath(document.uri)}:\n${before}`;
  const request = chatRequest([
    { role: "system", content: SYSTEM },
    { role: "user", content: content.trimEnd() },
  ]);
  const options = { location: vscode.ProgressLocation.Notification, title: "mlxbc: rewriting", cancellable: true };
  try {
    await vscode.window.withProgress(options, async (report, cancellation) => {
      let answer = "";
      const done = await connection.request(
        request,
        (reply) => {
          answer += token(reply);
          report.report({ message: answer ? `${answer.length} characters` : progress(reply) });
        },
        cancellation,
      );
      if (done.reason !== "stop") {
        void vscode.window.showWarningMessage(`mlxbc: the answer was cut (${done.reason}); the text stays as it is`);
        return;
      }
      const text = bare(answer) + newline;
      if (document.getText(selection) !== before) {
        await vscode.env.clipboard.writeText(text);
        void vscode.window.showWarningMessage("mlxbc: the text was changed meanwhile; the answer is in the clipboard");
        return;
      }
      const edit = new vscode.WorkspaceEdit();
      edit.replace(document.uri, selection, text);
      await vscode.workspace.applyEdit(edit);
    });
  } catch (error) {
    tell(error);
  }
}
