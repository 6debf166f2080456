// OpenAI's client for JavaScript: vectors as base64 by default, up to 2,048 texts a request.

// package: openai

import OpenAI from "openai";
import { inputs, method, run } from "./harness.mjs";

const client = new OpenAI({ baseURL: `${inputs.url}/v1`, apiKey: "none" });

async function vectors(input, options = {}) {
  const response = await client.embeddings.create({ model: "mini", input, ...options });
  return response.data.map((row) => row.embedding);
}

method("embeddings.create", "vectors", () => vectors(inputs.texts));

method("embeddings.create, 2,048 texts", "many", () => vectors(inputs.many));

method("embeddings.create, a long text", "long", async () => (await vectors(inputs.long))[0]);

method("embeddings.create, dimensions: 64", "short vectors", () =>
  vectors(inputs.texts, { dimensions: 64 }),
);

method("models.list", "models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  return names;
});

await run();
