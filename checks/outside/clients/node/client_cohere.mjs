// Cohere's client for JavaScript, both versions of its API.

// package: cohere-ai

import { CohereClient, CohereClientV2 } from "cohere-ai";
import { inputs, method, run } from "./harness.mjs";

const v1 = new CohereClient({ token: "none", environment: inputs.url });
const v2 = new CohereClientV2({ token: "none", environment: inputs.url });
const ranked = (response) => response.results.map(({ index, relevanceScore }) => [index, relevanceScore]);

method("CohereClient.embed", "vectors", async () => {
  const response = await v1.embed({
    model: "mini",
    texts: inputs.texts,
    inputType: "search_document",
  });
  return response.embeddings;
});

method("CohereClient.rerank", "ranking", async () =>
  ranked(await v1.rerank({ model: "ranker", query: inputs.query, documents: inputs.documents })),
);

method("CohereClientV2.embed", "vectors", async () => {
  const response = await v2.embed({
    model: "mini",
    texts: inputs.texts,
    inputType: "search_document",
    embeddingTypes: ["float"],
  });
  return response.embeddings.float;
});

method("CohereClientV2.rerank", "ranking", async () =>
  ranked(await v2.rerank({ model: "ranker", query: inputs.query, documents: inputs.documents })),
);

await run();
