"""LlamaIndex's reranking by Cohere's API."""

# package: llama-index-postprocessor-cohere-rerank

from harness import inputs, method, run
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank

reranker = CohereRerank(model="ranker", base_url=inputs.url, api_key="none", top_n=4)


@method("CohereRerank.postprocess_nodes", "ranking")
def postprocess_nodes() -> list[tuple[int, float]]:
    nodes = [
        NodeWithScore(node=TextNode(text=text, id_=str(index)))
        for index, text in enumerate(inputs.documents)
    ]
    ranking = reranker.postprocess_nodes(nodes, query_str=inputs.query)
    return [(int(node.node.node_id), node.score) for node in ranking]


run()
