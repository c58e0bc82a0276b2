// Owns what the user is told, and how often.

import * as vscode from "vscode";
import { Trouble } from "./connection";

const QUIET = new Set(["cancelled", "shutting_down", "connection_lost"]);
const PAUSE_MS = 2000;

/** Tells of one trouble once, until something works again: for what nobody asked for. */
export class Notice {
  private told: string | undefined;
  private notBefore = 0;

  /** Without a daemon, looking for it at every key is pointless. */
  get mayTry(): boolean {
    return Date.now() >= this.notBefore;
  }

  works(): void {
    this.told = undefined;
    this.notBefore = 0;
  }

  quietly(error: unknown): void {
    const code = error instanceof Trouble ? error.code : "internal";
    if (code === "absent") {
      this.notBefore = Date.now() + PAUSE_MS;
    }
    if (!QUIET.has(code) && code !== this.told) {
      this.told = code;
      void vscode.window.showWarningMessage(`mlxbc: ${text(error)}`);
    }
  }
}

/** Answers the user, who asked for something; a cancellation needs no answer. */
export function tell(error: unknown): void {
  if (!(error instanceof Trouble && error.code === "cancelled")) {
    void vscode.window.showErrorMessage(`mlxbc: ${text(error)}`);
  }
}

export function text(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
