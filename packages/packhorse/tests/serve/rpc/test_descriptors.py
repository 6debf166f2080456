"""Descriptors read from .proto files are those that protoc makes of them."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from packhorse.serve.rpc.descriptors import parse, read_interface

FOLDER = files("packhorse.serve.rpc")


def compile_proto(folder: Path, name: str, output: Path) -> descriptor_pb2.FileDescriptorProto:
    """Return what protoc makes of a file, without the names that fields have in JSON."""
    if find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    target = output / "descriptors.bin"
    words = [f"-I{folder}", f"--descriptor_set_out={target}", str(folder / name)]
    # In a process of its own: its C++ library crashes where TensorFlow's is loaded.
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *words], check=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return file


@pytest.mark.parametrize("name", ["tei.proto", "health.proto"])
def test_descriptors_are_those_of_protoc(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text("utf-8")
    expected = compile_proto(Path(str(FOLDER)), name, tmp_path)
    assert parse(text, name) == expected


def test_a_changed_number_is_another_descriptor() -> None:
    """A control: a descriptor that ignored numbers would compare equal."""
    text = (FOLDER / "tei.proto").read_text("utf-8")
    changed = text.replace("uint32 dimensions = 6", "uint32 dimensions = 7")
    assert changed != text
    assert parse(changed, "tei.proto") != parse(text, "tei.proto")


@pytest.mark.parametrize(
    "text",
    [
        'syntax = "proto2"; package a;',
        'syntax = "proto3"; package a; import "b.proto";',
        'syntax = "proto3"; package a; service B { option c = 1; }',
        'syntax = "proto3"; package a; message B { string c; }',
        'syntax = "proto3"; package a; message B { map<string, string> c = 1; }',
    ],
)
def test_what_the_parser_does_not_know_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.proto: did not expect"):
        parse(text, "x.proto")


def test_a_field_with_presence_knows_whether_it_is_set() -> None:
    messages = read_interface("tei.proto").messages
    request = messages["tei.v1.EmbedRequest"]()
    assert not request.HasField("normalize")
    request.normalize = False
    assert (
        messages["tei.v1.EmbedRequest"]
        .FromString(request.SerializeToString())
        .HasField("normalize")
    )
