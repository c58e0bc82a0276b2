// Owns a thin stand-in for the editor: as much of VS Code's API as the extension uses, and no behaviour beyond it.

"use strict";

const fs = require("node:fs");
const path = require("node:path");

class Position {
  constructor(line, character) {
    Object.assign(this, { line, character });
  }
}

class Range {
  constructor(...ends) {
    const [a, b, c, d] = ends;
    this.start = ends.length === 4 ? new Position(a, b) : a;
    this.end = ends.length === 4 ? new Position(c, d) : b;
  }
  get isEmpty() {
    return this.start.line === this.end.line && this.start.character === this.end.character;
  }
}

class Selection extends Range {
  get active() {
    return this.end;
  }
}

class CancellationTokenSource {
  constructor() {
    const listeners = new Set();
    this.token = {
      isCancellationRequested: false,
      onCancellationRequested(listener) {
        listeners.add(listener);
        return { dispose: () => listeners.delete(listener) };
      },
    };
    this.listeners = listeners;
  }
  cancel() {
    this.token.isCancellationRequested = true;
    [...this.listeners].forEach((listener) => listener());
  }
  dispose() {
    this.listeners.clear();
  }
}

class TextDocument {
  constructor(uri, languageId, text) {
    Object.assign(this, { uri, languageId, text, version: 1 });
  }
  get lines() {
    return this.text.split("\n");
  }
  get lineCount() {
    return this.lines.length;
  }
  lineAt(line) {
    const text = this.lines[line];
    if (text === undefined) {
      throw new Error("Illegal value for `line`");
    }
    return { text, range: new Range(line, 0, line, text.length) };
  }
  validatePosition({ line, character }) {
    const row = Math.min(Math.max(line, 0), this.lineCount - 1);
    return new Position(row, Math.min(Math.max(character, 0), this.lines[row].length));
  }
  offsetAt(position) {
    const { line, character } = this.validatePosition(position);
    return this.lines.slice(0, line).reduce((sum, text) => sum + text.length + 1, character);
  }
  getText(range) {
    return range ? this.text.slice(this.offsetAt(range.start), this.offsetAt(range.end)) : this.text;
  }
  replace(range, text) {
    this.text = this.text.slice(0, this.offsetAt(range.start)) + text + this.text.slice(this.offsetAt(range.end));
    this.version += 1;
  }
}

class WorkspaceEdit {
  edits = [];
  insert(uri, position, text) {
    this.replace(uri, new Range(position, position), text);
  }
  replace(uri, range, text) {
    this.edits.push({ uri, range, text });
  }
}

/** What the test sees and sets. */
const host = {
  settings: {},
  documents: [],
  commands: {},
  told: [],
  clipboard: "",
  answers: [],
  provider: undefined,
  participant: undefined,
  progress: undefined,
  open(name, text, languageId = "python") {
    const uri = { scheme: "file", path: `/home/me/${name}`, toString: () => `file:///home/me/${name}` };
    const document = new TextDocument(uri, languageId, text);
    host.documents.push(document);
    vscode.window.activeTextEditor = { document, selection: new Selection(0, 0, 0, 0) };
    vscode.window.visibleTextEditors = [vscode.window.activeTextEditor];
    return document;
  },
};

const contributed = JSON.parse(fs.readFileSync(process.env.MLXBC_EXTENSION + "/package.json", "utf8")).contributes;
const defaults = contributed.configuration.properties;
const say = (text) => void host.told.push(text);

const vscode = {
  host,
  Position,
  Range,
  Selection,
  CancellationTokenSource,
  WorkspaceEdit,
  InlineCompletionItem: class {
    constructor(insertText, range) {
      Object.assign(this, { insertText, range });
    }
  },
  InlineCompletionTriggerKind: { Invoke: 0, Automatic: 1 },
  ChatResponseMarkdownPart: class {
    constructor(value) {
      this.value = { value };
    }
  },
  ViewColumn: { Beside: -2 },
  ProgressLocation: { Notification: 15 },
  env: { clipboard: { writeText: async (text) => void (host.clipboard = text) } },
  commands: {
    registerCommand(name, run) {
      if (!contributed.commands.some(({ command }) => command === name)) {
        throw new Error(`${name} is not in package.json`);
      }
      host.commands[name] = run;
      return { dispose() {} };
    },
    executeCommand: async () => undefined,
  },
  languages: {
    registerInlineCompletionItemProvider(_selector, provider) {
      host.provider = provider;
      return { dispose() {} };
    },
  },
  chat: {
    createChatParticipant(_id, handler) {
      host.participant = handler;
      return { dispose() {} };
    },
  },
  window: {
    activeTextEditor: undefined,
    visibleTextEditors: [],
    showInformationMessage: async (text) => say(text),
    showWarningMessage: async (text) => say(text),
    showErrorMessage: async (text) => say(text),
    showInputBox: async () => host.answers.shift(),
    setStatusBarMessage: () => ({ dispose() {} }),
    onDidChangeActiveTextEditor: () => ({ dispose() {} }),
    async showTextDocument(document) {
      vscode.window.activeTextEditor = { document, selection: new Selection(0, 0, 0, 0) };
      return vscode.window.activeTextEditor;
    },
    async withProgress(_options, task) {
      host.progress = new CancellationTokenSource();
      return task({ report() {} }, host.progress.token);
    },
  },
  workspace: {
    getConfiguration(section) {
      return {
        get(key, otherwise) {
          const name = `${section}.${key}`;
          if (!(name in defaults)) {
            throw new Error(`${name} is not in package.json`);
          }
          return host.settings[name] ?? defaults[name].default ?? otherwise;
        },
      };
    },
    asRelativePath: (uri) => path.relative("/home/me", uri.path),
    async openTextDocument({ language, content }) {
      const document = new TextDocument({ scheme: "untitled", path: "/home/me/Untitled-1" }, language, content);
      host.documents.push(document);
      return document;
    },
    async applyEdit({ edits }) {
      for (const { uri, range, text } of edits) {
        host.documents.find((document) => document.uri === uri).replace(range, text);
      }
      return true;
    },
  },
};

module.exports = vscode;
