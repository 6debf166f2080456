// LangChain's OpenAIEmbeddings for JavaScript, which sends texts, 512 a request.

// package: @langchain/openai

import { OpenAIEmbeddings } from "@langchain/openai";
import { inputs, method, run } from "./harness.mjs";

const embeddings = new OpenAIEmbeddings({
  model: "mini",
  apiKey: "none",
  configuration: { baseURL: `${inputs.url}/v1` },
});

method("OpenAIEmbeddings.embedDocuments", "vectors", () => embeddings.embedDocuments(inputs.texts));

method("OpenAIEmbeddings.embedDocuments, 2,048 texts", "many", () =>
  embeddings.embedDocuments(inputs.many),
);

method("OpenAIEmbeddings.embedQuery", "vector", () => embeddings.embedQuery(inputs.texts[0]));

await run();
