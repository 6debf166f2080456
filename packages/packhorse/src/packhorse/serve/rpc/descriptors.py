"""Message classes from a .proto file, made when the server starts, without generated code.

    interface = read_interface("tei.proto", "health.proto")
    request = interface.messages["tei.v1.EmbedRequest"](inputs="A horse.", truncate=True)

protoc would write a Python module for each file. Such a module asks for a protobuf at least as new
as the protoc that wrote it, nobody can review it, and it has to be written anew with every change.
The files here use a small part of the language (messages, enums, services, `optional`, `repeated`,
`stream`), which a hundred lines read; tests compare the descriptors with protoc's own.

The descriptors are in a pool of their own: another library in the process may have the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}()=;]')
COMMENT = re.compile(r"//[^\n]*")
Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "bool": Field.TYPE_BOOL,
    "float": Field.TYPE_FLOAT,
    "string": Field.TYPE_STRING,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
}


@dataclass(frozen=True, slots=True)
class Interface:
    """The services and messages of some .proto files."""

    pool: descriptor_pool.DescriptorPool
    services: Mapping[str, Any]  # service descriptors by full name
    messages: Mapping[str, Any]  # message classes by full name


def read_interface(*names: str) -> Interface:
    """Read .proto files that lie beside this module."""
    pool = descriptor_pool.DescriptorPool()
    services: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for name in names:
        text = (files("packhorse.serve.rpc") / name).read_text("utf-8")
        file = pool.AddSerializedFile(parse(text, name).SerializeToString())
        for service in file.services_by_name.values():
            services[service.full_name] = service
        for message in file.message_types_by_name.values():
            messages[message.full_name] = message_factory.GetMessageClass(message)
    return Interface(pool, services, messages)


def parse(text: str, name: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a file in the part of proto3 that is described above."""
    return _Parser(text, name).parse()


class _Parser:
    """Reads a file token by token; a token it does not expect is an error."""

    def __init__(self, text: str, name: str) -> None:
        self.tokens: Iterator[str] = iter(TOKEN.findall(COMMENT.sub("", text)))
        self.file = descriptor_pb2.FileDescriptorProto(name=name)
        self.enums: set[str] = set()

    def parse(self) -> descriptor_pb2.FileDescriptorProto:
        self.expect("syntax", "=", '"proto3"', ";", "package")
        self.file.syntax = "proto3"
        self.file.package = next(self.tokens)
        self.expect(";")
        for keyword in self.tokens:
            match keyword:
                case "service":
                    self.read_service(self.file.service.add(name=next(self.tokens)))
                case "message":
                    self.read_message(self.file.message_type.add(name=next(self.tokens)))
                case "enum":
                    self.read_enum(self.file.enum_type.add(name=next(self.tokens)), "")
                case _:
                    raise self.unexpected(keyword)
        for message in self.file.message_type:
            for field in message.field:
                self.resolve(field)
        return self.file

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            actual = next(self.tokens, "the end")
            if actual != token:
                raise self.unexpected(actual)

    def unexpected(self, token: str) -> ValueError:
        return ValueError(f"{self.file.name}: did not expect {token!r}")

    def read_service(self, service: descriptor_pb2.ServiceDescriptorProto) -> None:
        self.expect("{")
        while (token := next(self.tokens)) != "}":
            if token != "rpc":
                raise self.unexpected(token)
            method = service.method.add(name=next(self.tokens))
            method.input_type, is_stream = self.read_parameter()
            if is_stream:
                method.client_streaming = True
            self.expect("returns")
            method.output_type, is_stream = self.read_parameter()
            if is_stream:
                method.server_streaming = True
            self.expect(";")

    def read_parameter(self) -> tuple[str, bool]:
        """Read `(Type)` or `(stream Type)`; return the type and whether it is a stream."""
        self.expect("(")
        token = next(self.tokens)
        is_stream = token == "stream"
        name = next(self.tokens) if is_stream else token
        self.expect(")")
        return self.full_name(name), is_stream

    def read_message(self, message: descriptor_pb2.DescriptorProto) -> None:
        self.expect("{")
        while (token := next(self.tokens)) != "}":
            if token == "enum":
                self.read_enum(message.enum_type.add(name=next(self.tokens)), f"{message.name}.")
                continue
            field = message.field.add(label=Field.LABEL_OPTIONAL)
            is_optional = token == "optional"
            if token == "repeated":
                field.label = Field.LABEL_REPEATED
            field.type_name = next(self.tokens) if token in ("optional", "repeated") else token
            field.name = next(self.tokens)
            self.expect("=")
            field.number = int(next(self.tokens))
            self.expect(";")
            if is_optional:
                # proto3 has fields with presence as the only member of a oneof.
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def read_enum(self, enum: descriptor_pb2.EnumDescriptorProto, scope: str) -> None:
        self.enums.add(scope + enum.name)
        self.expect("{")
        while (name := next(self.tokens)) != "}":
            self.expect("=")
            enum.value.add(name=name, number=int(next(self.tokens)))
            self.expect(";")

    def resolve(self, field: Any) -> None:
        """Turn the type's name as it is written into protobuf's number and full name."""
        name = field.type_name
        if name in SCALARS:
            field.type = SCALARS[name]
            field.ClearField("type_name")
            return
        enum = next((full for full in self.enums if full.split(".")[-1] == name), None)
        field.type = Field.TYPE_MESSAGE if enum is None else Field.TYPE_ENUM
        field.type_name = self.full_name(enum or name)

    def full_name(self, name: str) -> str:
        return f".{self.file.package}.{name}"
