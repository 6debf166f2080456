"""LlamaIndex's reranking by text-embeddings-inference."""

# package: llama-index-postprocessor-tei-rerank

from harness import inputs, method, run
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

reranker = TextEmbeddingInference(base_url=inputs.url)


@method("TextEmbeddingInference.postprocess_nodes", "ranking")
def postprocess_nodes() -> list[tuple[int, float]]:
    nodes = [
        NodeWithScore(node=TextNode(text=text, id_=str(index)))
        for index, text in enumerate(inputs.documents)
    ]
    ranking = reranker.postprocess_nodes(nodes, query_str=inputs.query)
    return [(int(node.node.node_id), node.score) for node in ranking]


run()
