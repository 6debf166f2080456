// Hugging Face's InferenceClient for JavaScript, which takes the URL of a model's own endpoint.

// package: @huggingface/inference

import { InferenceClient } from "@huggingface/inference";
import { inputs, method, run } from "./harness.mjs";

const endpoint = (model) => new InferenceClient(undefined, { endpointUrl: `${inputs.url}/models/${model}` });

method("featureExtraction", "vectors", () => endpoint("mini").featureExtraction({ inputs: inputs.texts }));

method("sentenceSimilarity", "similarities", () =>
  endpoint("mini").sentenceSimilarity({
    inputs: { source_sentence: inputs.texts[0], sentences: inputs.texts.slice(1) },
  }),
);

method("textClassification", "labels", async () => {
  const labels = await endpoint("judge").textClassification({ inputs: inputs.statement });
  return Object.fromEntries(labels.map(({ label, score }) => [label, score]));
});

method("tokenClassification", "entities", async () => {
  const entities = await endpoint("tagger").tokenClassification({ inputs: inputs.statement });
  return entities.map(({ entity_group, word, start, end }) => [entity_group, word, start, end]);
});

method("questionAnswering", "answer", async () => {
  const { answer, start, end } = await endpoint("reader").questionAnswering({
    inputs: { question: inputs.question, context: inputs.context },
  });
  return [answer, start, end];
});

method("fillMask", "words", async () => {
  const words = await endpoint("filler").fillMask({ inputs: inputs.masked });
  return words.map((word) => word.token_str);
});

await run();
