// Owns what the model sees of the editors, and the completion request that is made of it.

import * as vscode from "vscode";
import { unicode } from "./connection";

/** However long lines are, no more characters than these are sent of each part. */
const PREFIX = 32768;
const SUFFIX = 8192;
const CHUNK = 8192;

export interface Fim {
  prefix: string;
  suffix: string;
  path: string;
  language: string;
  context?: { path: string; text: string }[];
  single_line?: true;
}

export function settings(): vscode.WorkspaceConfiguration {
  return vscode.workspace.getConfiguration("mlxbc");
}

/** The text around a position. */
export function around(document: vscode.TextDocument, position: vscode.Position): Fim {
  const before = settings().get("completion.linesBefore", 256);
  const after = settings().get("completion.linesAfter", 64);
  // The beginning moves in steps: one that moved with every line would make the daemon read all of it anew.
  const step = Math.max(1, Math.floor(before / 2));
  const first = Math.max(0, Math.ceil((position.line - before) / step) * step);
  const from = new vscode.Position(first, 0);
  const to = document.validatePosition(new vscode.Position(position.line + after, Number.MAX_SAFE_INTEGER));
  const behind = document.lineAt(position.line).text.slice(position.character);
  const chunks = elsewhere(document);
  return {
    prefix: unicode(tail(document.getText(new vscode.Range(from, position)))),
    suffix: unicode(document.getText(new vscode.Range(position, to)).slice(0, SUFFIX)),
    path: vscode.workspace.asRelativePath(document.uri),
    language: document.languageId,
    ...(chunks.length > 0 ? { context: chunks } : {}),
    ...(behind.trim() ? { single_line: true } : {}),
  };
}

/** The end of a text; where it begins moves in steps, as with lines. */
function tail(text: string): string {
  const step = PREFIX / 2;
  return text.slice(Math.max(0, Math.ceil((text.length - PREFIX) / step) * step));
}

/** What the other visible editors show around their cursors. */
function elsewhere(document: vscode.TextDocument): { path: string; text: string }[] {
  const around = Math.floor(settings().get("completion.linesElsewhere", 64) / 2);
  const seen = new Set([document]);
  return vscode.window.visibleTextEditors.flatMap((editor) => {
    const other = editor.document;
    if (around === 0 || seen.has(other) || !["file", "untitled"].includes(other.uri.scheme)) {
      return [];
    }
    seen.add(other);
    // Moving a little must not change the chunk: the daemon keeps what it has read of a prompt's beginning.
    const middle = Math.round(editor.selection.active.line / around) * around;
    const text = other.getText(new vscode.Range(Math.max(0, middle - around), 0, middle + around, 0));
    return text.trim() ? [{ path: vscode.workspace.asRelativePath(other.uri), text: unicode(text.slice(0, CHUNK)) }] : [];
  });
}

/** The request for a completion. */
export function completionRequest(fim: Fim): object {
  const model = settings().get("completion.model", "");
  return {
    type: "generate",
    supersede: "completion",
    priority: "interactive",
    deadline_ms: settings().get("completion.deadlineMs", 3000),
    max_tokens: settings().get("completion.maxTokens", 96),
    temperature: 0,
    fim,
    ...(model ? { model } : {}),
  };
}

/** The request for an answer to `messages`. */
export function chatRequest(messages: { role: string; content: string }[]): object {
  const model = settings().get("chat.model", "");
  return {
    type: "generate",
    priority: "interactive",
    messages: messages.map(({ role, content }) => ({ role, content: unicode(content) })),
    ...(model ? { model } : {}),
  };
}
