// Vercel's AI SDK by its provider for servers with OpenAI's API.

// package: @ai-sdk/openai-compatible

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, embedMany } from "ai";
import { inputs, method, run } from "./harness.mjs";

const provider = createOpenAICompatible({ name: "packhorse", baseURL: `${inputs.url}/v1` });
const model = provider.embeddingModel("mini");

method("embed", "vector", async () => (await embed({ model, value: inputs.texts[0] })).embedding);

method("embedMany", "vectors", async () => (await embedMany({ model, values: inputs.texts })).embeddings);

method("embedMany, 2,048 texts", "many", async () => {
  const { embeddings } = await embedMany({ model, values: inputs.many });
  return embeddings;
});

await run();
