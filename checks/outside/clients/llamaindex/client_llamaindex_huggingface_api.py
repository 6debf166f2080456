"""LlamaIndex's embedding by Hugging Face's InferenceClient."""

# package: llama-index-embeddings-huggingface-api

from harness import inputs, method, run
from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding

embedding = HuggingFaceInferenceAPIEmbedding(model_name=inputs.url)


@method("HuggingFaceInferenceAPIEmbedding.get_text_embedding_batch", "vectors")
def get_text_embedding_batch() -> list[list[float]]:
    return embedding.get_text_embedding_batch(inputs.texts)


run()
