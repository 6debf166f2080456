"""A client made of text-embeddings-inference's own proto file talks to our gRPC server.

PACKHORSE_TEI_PROTO names the folder `proto` of a clone of huggingface/text-embeddings-inference.
Its `tei.proto` is compiled with grpcio-tools in a process of its own, which then calls every method
of every service; what comes back is compared with the library.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse
from packhorse.reports import random_model

VARIABLE = "PACKHORSE_TEI_PROTO"
FOLDER = os.environ.get(VARIABLE, "")
pytestmark = pytest.mark.skipif(not FOLDER, reason=f"{VARIABLE} is not set")
CLIENT = """
import json
import sys
import grpc
import tei_pb2
import tei_pb2_grpc

channel = grpc.insecure_channel("127.0.0.1:" + sys.argv[1])
text = "w1 w2 w3"
many = lambda message: iter([message, message])
embed = tei_pb2_grpc.EmbedStub(channel)
request = tei_pb2.EmbedRequest(inputs=text, truncate=True)
vectors = [list(embed.Embed(request).embeddings)]
vectors += [list(answer.embeddings) for answer in embed.EmbedStream(many(request))]
request = tei_pb2.EmbedAllRequest(inputs=text)
states = [[list(token.embeddings) for token in embed.EmbedAll(request).token_embeddings]]
states += [
    [list(token.embeddings) for token in answer.token_embeddings]
    for answer in embed.EmbedAllStream(many(request))
]
tokenize = tei_pb2_grpc.TokenizeStub(channel)
request = tei_pb2.EncodeRequest(inputs=text, add_special_tokens=True)
tokens = [[token.id for token in tokenize.Tokenize(request).tokens]]
tokens += [[t.id for t in answer.tokens] for answer in tokenize.TokenizeStream(many(request))]
request = tei_pb2.DecodeRequest(ids=tokens[0], skip_special_tokens=True)
texts = [tokenize.Decode(request).text]
texts += [answer.text for answer in tokenize.DecodeStream(many(request))]
info = tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest())

def code(call, *arguments):
    try:
        list(answer) if hasattr(answer := call(*arguments), "__iter__") else answer
    except grpc.RpcError as error:
        return error.code().name

sparse = tei_pb2.EmbedSparseRequest(inputs=text)
pair = tei_pb2.PredictPairRequest(inputs=[text, text])
predict = tei_pb2_grpc.PredictStub(channel)
rerank = tei_pb2_grpc.RerankStub(channel)
ranked = tei_pb2.RerankRequest(query=text, texts=[text])
rank = tei_pb2.RerankStreamRequest(query=text, text=text)
codes = [
    code(embed.EmbedSparse, sparse),
    code(embed.EmbedSparseStream, many(sparse)),
    code(predict.Predict, tei_pb2.PredictRequest(inputs=text)),
    code(predict.PredictPair, pair),
    code(predict.PredictStream, many(tei_pb2.PredictRequest(inputs=text))),
    code(predict.PredictPairStream, many(pair)),
    code(rerank.Rerank, ranked),
    code(rerank.RerankStream, many(rank)),
    code(embed.Embed, tei_pb2.EmbedRequest(inputs="")),
]
result = dict(vectors=vectors, states=states, tokens=tokens, texts=texts, codes=codes)
print(json.dumps(result | dict(model=info.model_id, kind=info.model_type)))
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules that grpcio-tools makes of their file."""
    folder = tmp_path_factory.mktemp("stubs")
    words = ["grpc_tools.protoc", f"-I{FOLDER}", f"--python_out={folder}"]
    words += [f"--grpc_python_out={folder}", "tei.proto"]
    subprocess.run([sys.executable, "-m", *words], check=True)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write("tiny", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def port(model: Path) -> Iterator[int]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    words = ["serve", "--model", f"tiny={model}", "--port", "0", "--grpc-port", str(port)]
    command = [sys.executable, "-m", "packhorse", *words, "--device", "cpu", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and json.loads(process.stdout.readline())["grpc_port"] == port
        yield port
        process.terminate()
        assert process.wait(120) == 0


def test_their_file_and_ours_are_the_same_interface(tmp_path: Path) -> None:
    from google.protobuf import descriptor_pb2

    from packhorse.serve.rpc.descriptors import parse

    target = tmp_path / "descriptors.bin"
    words = ["grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={target}", "tei.proto"]
    subprocess.run([sys.executable, "-m", *words], check=True)
    (official,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    # Neither names in JSON nor options are on the wire, nor the order of messages in the file.
    for message in official.message_type:
        for field in message.field:
            field.ClearField("json_name")
    for service in official.service:
        for method in service.method:
            method.ClearField("options")
    ours = parse((files("packhorse.serve.rpc") / "tei.proto").read_text("utf-8"), "tei.proto")
    assert by_name(ours) == by_name(official)


def by_name(file: Any) -> dict[str, Any]:
    parts = (*file.message_type, *file.enum_type, *file.service)
    return {part.name: part for part in parts} | {"package": file.package}


def test_their_client_gets_what_the_library_computes(stubs: Path, port: int, model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(stubs)}
    completed = subprocess.run(
        [sys.executable, "-c", CLIENT, str(port)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    encoder = packhorse.load(model, device="cpu")
    text = ["w1 w2 w3"]
    np.testing.assert_allclose(result["vectors"], [encoder.embed(text)[0]] * 3, atol=1e-5)
    np.testing.assert_allclose(result["states"], [encoder.hidden(text)[0].states] * 3, atol=1e-5)
    assert result["tokens"] == [encoder.tokenize(text)[0].ids.tolist()] * 3
    assert result["texts"] == text * 3
    assert (result["model"], result["kind"]) == ("tiny", 0)
    # An embedding model has no labels and makes no sparse vectors; an empty text is no text.
    assert result["codes"] == ["FAILED_PRECONDITION"] * 8 + ["INVALID_ARGUMENT"]
