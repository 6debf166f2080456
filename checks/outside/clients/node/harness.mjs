// What a client's script needs: the inputs, a way to name its methods, and a file of results.
// The same as harness.py, for clients in JavaScript: `node script.mjs INPUTS.json RESULTS.json`.

import { readFileSync, writeFileSync } from "node:fs";

// Texts and names of models, as `test_clients.py` wrote them.
export const inputs = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const methods = new Map();

// Register a function under the client's method that it calls; `kind` is what its value is.
export function method(name, kind, call) {
  methods.set(name, call);
}

// Call every method and write the results.
export async function run() {
  const results = {};
  for (const [name, call] of methods) {
    try {
      results[name] = { value: await call() };
    } catch (error) {
      console.error(error);
      results[name] = { error: String(error).slice(0, 600) };
    }
  }
  writeFileSync(process.argv[3], JSON.stringify(results));
}
