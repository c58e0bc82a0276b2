// Owns completion while typing: when the daemon is asked, and what becomes of its answer.

import * as vscode from "vscode";
import { Cancellation, Connection, token } from "./connection";
import { around, completionRequest, settings } from "./context";
import { Notice, tell } from "./notice";

/** A suggestion that was shown, and the text that it belongs behind. */
interface Shown {
  uri: string;
  before: string;
  behind: string;
  text: string;
}

export class Completion implements vscode.InlineCompletionItemProvider {
  private shown: Shown | undefined;

  constructor(
    private readonly connection: Connection,
    private readonly notice: Notice,
  ) {}

  async provideInlineCompletionItems(
    document: vscode.TextDocument,
    position: vscode.Position,
    context: vscode.InlineCompletionContext,
    cancellation: vscode.CancellationToken,
  ): Promise<vscode.InlineCompletionItem[]> {
    const asked = context.triggerKind === vscode.InlineCompletionTriggerKind.Invoke;
    const excluded = settings().get<string[]>("completion.exclude", []).includes(document.languageId);
    if (!asked && (!settings().get("completion.enabled", true) || excluded || !this.notice.mayTry)) {
      return [];
    }
    const fim = around(document, position);
    const behind = document.lineAt(position.line).text.slice(position.character);
    const uri = document.uri.toString();
    const known = asked ? "" : this.rest(uri, fim.prefix, behind);
    if (known) {
      return [new vscode.InlineCompletionItem(known, new vscode.Range(position, position))];
    }
    if (!asked && !(await silence(settings().get("completion.debounceMs", 60), cancellation))) {
      return [];
    }
    try {
      let text = "";
      const done = await this.connection.request(
        completionRequest(fim),
        (reply) => {
          text += token(reply);
        },
        cancellation,
      );
      this.notice.works();
      text = trimmed(text, done.reason === "length" || done.reason === "deadline", behind);
      this.shown = { uri, before: fim.prefix, behind, text };
      return text ? [new vscode.InlineCompletionItem(text, new vscode.Range(position, position))] : [];
    } catch (error) {
      if (asked) {
        tell(error);
      } else {
        this.notice.quietly(error);
      }
      return [];
    }
  }

  /** What is left of the last suggestion, if the user has typed the beginning of it since. */
  private rest(uri: string, prefix: string, behind: string): string {
    const shown = this.shown;
    if (!shown || shown.uri !== uri || shown.behind !== behind || !prefix.startsWith(shown.before)) {
      return "";
    }
    const typed = prefix.slice(shown.before.length);
    return shown.text.startsWith(typed) ? shown.text.slice(typed.length) : "";
  }
}

/**
 * A suggestion as it is shown: one of several lines that was cut off ends with its last whole line, and what stands
 * behind the cursor already is not suggested again.
 */
export function trimmed(text: string, cut: boolean, behind: string): string {
  let rest = (cut && text.includes("\n") ? text.slice(0, text.lastIndexOf("\n")) : text).trimEnd();
  if (behind && rest.endsWith(behind)) {
    rest = rest.slice(0, -behind.length);
  }
  return rest.trim() ? rest : "";
}

/** Waits out a pause at the keyboard; false if it was none. */
function silence(milliseconds: number, cancellation: Cancellation): Promise<boolean> {
  return new Promise((resolve) => {
    const end = (silent: boolean): void => {
      clearTimeout(timer);
      watching.dispose();
      resolve(silent);
    };
    const timer = setTimeout(() => end(true), milliseconds);
    const watching = cancellation.onCancellationRequested(() => end(false));
    if (cancellation.isCancellationRequested) {
      end(false);
    }
  });
}
