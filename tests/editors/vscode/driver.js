// Runs the extension as its host does, and whatever code comes as a line on standard input: {"number", "code"}.
// Each is answered by one line, {"number", "value"} or {"number", "error"}, when it is done; others don't wait for it.

"use strict";

const Module = require("node:module");
const readline = require("node:readline");
const fake = `${__dirname}/vscode.js`;
const resolve = Module._resolveFilename;
Module._resolveFilename = (name, ...rest) => (name === "vscode" ? fake : resolve(name, ...rest));

const vscode = require(fake);
const extension = require(process.argv[2]);
const context = { subscriptions: [] };
extension.activate(context);

const AsyncFunction = (async () => {}).constructor;
const say = (answer) => process.stdout.write(`${JSON.stringify(answer)}\n`);

const lines = readline.createInterface({ input: process.stdin });
lines.on("line", async (line) => {
  const { number, code } = JSON.parse(line);
  try {
    say({ number, value: (await new AsyncFunction("vscode", "host", code)(vscode, vscode.host)) ?? null });
  } catch (error) {
    say({ number, error: String(error.stack) });
  }
});
lines.on("close", () => context.subscriptions.forEach((subscription) => subscription.dispose()));
