"""grpcio with what grpcio-tools makes of text-embeddings-inference's own tei.proto."""

# package: grpcio
# needs: PACKHORSE_TEI_PROTO

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import grpc
from harness import inputs, method, run

with tempfile.TemporaryDirectory() as stubs:
    words = [f"-I{os.environ['PACKHORSE_TEI_PROTO']}", f"--python_out={stubs}"]
    words += [f"--grpc_python_out={stubs}", "tei.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *words], check=True)
    sys.path.insert(0, stubs)
    import tei_pb2
    import tei_pb2_grpc

channel = grpc.insecure_channel(inputs.grpc_address)
embedding = tei_pb2_grpc.EmbedStub(channel)
prediction = tei_pb2_grpc.PredictStub(channel)
ranking = tei_pb2_grpc.RerankStub(channel)
tokens = tei_pb2_grpc.TokenizeStub(channel)


def ranks(response: Any) -> list[tuple[int, float]]:
    return [(rank.index, rank.score) for rank in response.ranks]


def states(response: Any) -> list[list[float]]:
    return [list(token.embeddings) for token in response.token_embeddings]


def labels(response: Any) -> dict[str, float]:
    return {prediction.label: prediction.score for prediction in response.predictions}


def ids(response: Any) -> list[int]:
    return [token.id for token in response.tokens]


def only(responses: Iterable[Any]) -> Any:
    (response,) = responses
    return response


@method("Info/Info", "model")
def info() -> str:
    return tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest()).model_id


@method("Embed/Embed", "vector")
def embed() -> list[float]:
    return list(embedding.Embed(tei_pb2.EmbedRequest(inputs=inputs.texts[0])).embeddings)


@method("Embed/EmbedStream", "vectors")
def embed_stream() -> list[list[float]]:
    requests = (tei_pb2.EmbedRequest(inputs=text) for text in inputs.texts)
    return [list(response.embeddings) for response in embedding.EmbedStream(requests)]


@method("Embed/EmbedAll", "states")
def embed_all() -> list[list[float]]:
    return states(embedding.EmbedAll(tei_pb2.EmbedAllRequest(inputs=inputs.texts[0])))


@method("Embed/EmbedAllStream", "states")
def embed_all_stream() -> list[list[float]]:
    requests = iter([tei_pb2.EmbedAllRequest(inputs=inputs.texts[0])])
    return states(only(embedding.EmbedAllStream(requests)))


@method("Embed/EmbedSparse", "vector")
def embed_sparse() -> list[float]:
    response = embedding.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs=inputs.texts[0]))
    return [entry.value for entry in response.sparse_embeddings]


@method("Predict/Predict", "labels")
def predict() -> dict[str, float]:
    return labels(prediction.Predict(tei_pb2.PredictRequest(inputs=inputs.statement)))


@method("Predict/PredictStream", "labels")
def predict_stream() -> dict[str, float]:
    requests = iter([tei_pb2.PredictRequest(inputs=inputs.statement)])
    return labels(only(prediction.PredictStream(requests)))


@method("Predict/PredictPair", "labels_of_a_pair")
def predict_pair() -> dict[str, float]:
    request = tei_pb2.PredictPairRequest(inputs=[inputs.question, inputs.statement])
    return labels(prediction.PredictPair(request))


@method("Predict/PredictPairStream", "labels_of_a_pair")
def predict_pair_stream() -> dict[str, float]:
    request = tei_pb2.PredictPairRequest(inputs=[inputs.question, inputs.statement])
    return labels(only(prediction.PredictPairStream(iter([request]))))


@method("Rerank/Rerank", "ranking")
def rerank() -> list[tuple[int, float]]:
    request = tei_pb2.RerankRequest(query=inputs.query, texts=inputs.documents)
    return ranks(ranking.Rerank(request))


@method("Rerank/RerankStream", "ranking")
def rerank_stream() -> list[tuple[int, float]]:
    requests = (
        tei_pb2.RerankStreamRequest(query=inputs.query, text=document)
        for document in inputs.documents
    )
    return ranks(ranking.RerankStream(requests))


@method("Tokenize/Tokenize", "tokens")
def tokenize() -> list[int]:
    request = tei_pb2.EncodeRequest(inputs=inputs.texts[0], add_special_tokens=True)
    return ids(tokens.Tokenize(request))


@method("Tokenize/TokenizeStream", "tokens")
def tokenize_stream() -> list[int]:
    request = tei_pb2.EncodeRequest(inputs=inputs.texts[0], add_special_tokens=True)
    return ids(only(tokens.TokenizeStream(iter([request]))))


@method("Tokenize/Decode", "decoded")
def decode() -> str:
    return tokens.Decode(tei_pb2.DecodeRequest(ids=tokenize(), skip_special_tokens=True)).text


@method("Tokenize/DecodeStream", "decoded")
def decode_stream() -> str:
    request = tei_pb2.DecodeRequest(ids=tokenize(), skip_special_tokens=True)
    return only(tokens.DecodeStream(iter([request]))).text


run()
