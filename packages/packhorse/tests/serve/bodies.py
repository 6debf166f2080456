"""One valid body for every POST route whose path has no parameters; a new route gets a line here.

`test_shortcut` fails if a route is missing. `test_reliability` replaces "cat" in these bodies by
other words, to attack a route, so some text of each body has it (that of /fill: "the [MASK]").
"""

from __future__ import annotations

from typing import Any

BODIES: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": ["the cat", "a mat"]},
    "/embed_all": {"inputs": "the cat"},
    "/embed_sparse": {"inputs": "the cat"},
    "/embed_multi": {"inputs": "the cat"},
    "/predict": {"inputs": "the cat"},
    "/rerank": {"query": "who sat", "texts": ["the cat", "a mat"]},
    "/similarity": {"inputs": {"source_sentence": "the cat", "sentences": ["a mat"]}},
    "/tokenize": {"inputs": "the cat"},
    "/decode": {"ids": [5, 6]},
    "/v1/embeddings": {"input": "the cat"},
    "/v1/embed": {"texts": ["the cat", "a mat"]},
    "/v2/embed": {"texts": ["the cat", "a mat"]},
    "/v1/classify": {"inputs": ["the cat", "a mat"]},
    "/v1/tokenize": {"text": "the cat"},
    "/v1/detokenize": {"tokens": [5, 6]},
    "/v1/rerank": {"query": "who sat", "documents": ["the cat", "a mat"]},
    "/v2/rerank": {"query": "who sat", "documents": ["the cat", "a mat"]},
    "/": {"inputs": "the cat"},
    "/answer": {"question": "who sat", "context": "the cat sat on a mat"},
    "/fill": {"inputs": "the [MASK] sat"},
    "/classify": {"inputs": "the cat"},
    "/ner": {"inputs": "the cat sat"},
    "/pooling": {"input": "the cat"},
    "/score": {"text_1": "who sat", "text_2": ["the cat", "a mat"]},
    "/v1/score": {"text_1": "who sat", "text_2": ["the cat", "a mat"]},
    "/detokenize": {"tokens": [5, 6]},
    "/embeddings": {"input": "the cat"},
    "/invocations": {"inputs": "the cat"},
    "/vertex": {"instances": [{"inputs": "the cat"}]},
}
# Routes that run no model.
TOKENS_ONLY = ("/tokenize", "/detokenize", "/decode", "/v1/tokenize", "/v1/detokenize")
