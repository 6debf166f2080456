"""LangChain's class for Hugging Face's endpoints."""

# package: langchain-huggingface

from harness import inputs, method, run
from langchain_huggingface import HuggingFaceEndpointEmbeddings


@method("HuggingFaceEndpointEmbeddings.embed_documents", "vectors")
def embed_documents() -> list[list[float]]:
    return HuggingFaceEndpointEmbeddings(model=inputs.url).embed_documents(inputs.texts)


run()
