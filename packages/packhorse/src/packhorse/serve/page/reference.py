"""The API reference at `GET /docs`: the OpenAPI document of this server as a page without scripts.

FastAPI's own page loads scripts from other hosts, which the content security policy forbids and a
machine without a network cannot do. Here everything is HTML from the start, and routes open and
close by `<details>`. All texts of the document are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, cast

Json = Mapping[str, Any]
STYLE = """
:root { color-scheme: light dark; --ground: light-dark(#faf8f4, #161513);
  --surface: light-dark(#ffffff, #1f1d1a); --sunken: light-dark(#f2efe8, #282622);
  --line: light-dark(#e3ded3, #3a3732); --ink: light-dark(#211f1b, #ece8df);
  --soft: light-dark(#655f54, #aaa497); --accent: light-dark(#0b6657, #63c9b3);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.75rem clamp(1rem, 4vw, 2.5rem) 4rem;
  background: var(--ground); color: var(--ink); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; letter-spacing: -.015em; margin: 0 0 .4rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 70ch; }
a { color: var(--accent); text-underline-offset: .2em; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 1rem 0; }
nav a { display: inline-flex; align-items: center; min-height: 2.2rem; }
code, pre { font: .88em/1.5 ui-monospace, "SF Mono", "Cascadia Code", monospace; }
pre { margin: .4rem 0; padding: .8rem .9rem; background: var(--sunken); border-radius: 10px;
  white-space: pre-wrap; }
details { background: var(--surface); border: 1px solid var(--line); border-radius: 10px;
  margin-block: .5rem; padding: 0 1rem; }
details[open] { padding-bottom: 1rem; }
summary { min-height: 2.75rem; padding-block: .55rem; cursor: pointer; }
summary > code { font-weight: 600; }
.soft { color: var(--soft); }
dl { margin: 0; }
dt { margin-top: .7rem; }
dt > code { font-weight: 600; }
dd { margin: .1rem 0 0; color: var(--soft); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (pointer: coarse) { nav a { min-height: 2.75rem; } }
"""
DEPTH = 3  # of fields within fields; deeper ones are named by their type alone


def render(document: Json) -> str:
    """Return the page of an OpenAPI document."""
    operations: dict[str, list[str]] = {}
    schemas = document.get("components", {}).get("schemas", {})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = operation.get("tags", ["Other"])[0]
            operations.setdefault(tag, []).append(_operation(method, path, operation, schemas))
    links = "".join(f'<a href="#{_anchor(tag)}">{escape(tag)}</a>' for tag in operations)
    sections = "".join(
        f'<section id="{_anchor(tag)}"><h2>{escape(tag)}</h2>{"".join(rows)}</section>'
        for tag, rows in operations.items()
    )
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}: API reference</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}: API reference</h1>"
        '<p class="soft">The routes of this server by the API that they follow. In the commands '
        "<code>$SERVER</code> is its address; a server with keys also needs "
        "<code>-H 'Authorization: Bearer KEY'</code>. The same for programs: "
        '<a href="openapi.json">openapi.json</a>. <a href="./">Back to the page</a>.</p>'
        f'<nav aria-label="APIs">{links}</nav><main>{sections}</main></body></html>\n'
    )


def _prose(text: str) -> str:
    """Escape a description; what stands between backquotes is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _anchor(tag: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in tag.lower())


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    description = _prose(operation.get("description", ""))
    parts = [
        f"<details><summary><code>{method.upper()} {escape(path)}</code> "
        f'<span class="soft">{description}</span></summary>'
    ]
    parameters = operation.get("parameters", [])
    if parameters:
        parts.append(f"<h3>Parameters</h3><dl>{''.join(_parameter(p) for p in parameters)}</dl>")
    body = _content(operation.get("requestBody", {}))
    if body is not None:
        for schema in _alternatives(body, schemas):
            parts.append(f"<h3>Body</h3>{_fields(schema, schemas)}")
            example = json.dumps(_example(schema, schemas), ensure_ascii=False)
            parts.append(f"<pre>{escape(_curl(path, example))}</pre>")
    answer = _content(operation.get("responses", {}).get("200", {}))
    if answer is not None:
        for schema in _alternatives(answer, schemas):
            parts.append(f"<h3>Answer</h3>{_fields(schema, schemas)}")
    statuses = [
        f"<dt><code>{escape(status)}</code></dt><dd>{_prose(response['description'])}</dd>"
        for status, response in operation.get("responses", {}).items()
        if status != "200"
    ]
    if statuses:
        parts.append(f"<h3>Errors</h3><dl>{''.join(statuses)}</dl>")
    return "".join([*parts, "</details>"])


def _curl(path: str, example: str) -> str:
    quoted = example.replace("'", "'\\''")
    return f"curl -s $SERVER{path} -H 'Content-Type: application/json' -d '{quoted}'"


def _content(message: Json) -> Json | None:
    """Return the schema of a JSON body, if the request or response has one."""
    content = message.get("content", {}).get("application/json")
    return content and content["schema"]


def _parameter(parameter: Json) -> str:
    schema = parameter["schema"]
    note = parameter.get("description") or schema.get("description", "")
    return (
        f"<dt><code>{escape(parameter['name'])}</code> <span class='soft'>{_type(schema)}</span>"
        f"</dt><dd>{_prose(note)}</dd>"
    )


def _resolved(schema: Json, schemas: Json) -> Json:
    """Follow a reference to the schema that it names."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _alternatives(schema: Json, schemas: Json) -> list[Json]:
    """Return the bodies that a route takes, or the answers that it gives."""
    schema = _resolved(schema, schemas)
    choices = schema.get("oneOf") or schema.get("anyOf") or [schema]
    if all(_resolved(choice, schemas).get("type") == "object" for choice in choices):
        return [_resolved(choice, schemas) for choice in choices]
    return [schema]


def _fields(schema: Json, schemas: Json, depth: int = 1) -> str:
    """Describe a schema: its sentence, then its fields or what its items are."""
    schema = _resolved(schema, schemas)
    note = f"<p>{_prose(schema['description'])}</p>" if "description" in schema else ""
    if "properties" not in schema:
        items = _object_within(schema, schemas)
        shown = f"<p class='soft'>{_type(schema)}</p>"
        return note + shown + (_fields(items, schemas, depth) if items and depth < DEPTH else "")
    required = schema.get("required", ())
    rows = "".join(
        _field(name, part, name in required, schemas, depth)
        for name, part in schema["properties"].items()
    )
    return f"{note}<dl>{rows}</dl>"


def _field(name: str, schema: Json, is_required: bool, schemas: Json, depth: int) -> str:
    facts = [_type(schema)]
    if is_required:
        facts.append("required")
    elif schema.get("default") is not None:
        facts.append(f"default {json.dumps(schema['default'], ensure_ascii=False)}")
    inner = _object_within(schema, schemas)
    nested = _fields(inner, schemas, depth + 1) if inner and depth < DEPTH else ""
    return (
        f"<dt><code>{escape(name)}</code> <span class='soft'>{escape(', '.join(facts))}</span></dt>"
        f"<dd>{_prose(schema.get('description', ''))}{nested}</dd>"
    )


def _object_within(schema: Json, schemas: Json) -> Json | None:
    """Return the object that a schema is, or that its items are, at any depth of lists."""
    for part in _parts(schema):
        resolved = _resolved(part, schemas)
        if "properties" in resolved:
            return resolved
        if resolved is not part and (inner := _object_within(resolved, schemas)):
            return inner
    return None


def _parts(schema: Json) -> Iterator[Json]:
    yield schema
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key, ()):
            yield from _parts(part)
    if isinstance(schema.get("items"), dict):
        yield from _parts(cast("Json", schema["items"]))


def _type(schema: Json) -> str:
    """Return a type in words, as `string or array of integer`."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            names = [_type(part) for part in schema[key]]
            return " or ".join(dict.fromkeys(name for name in names if name != "null"))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in values)
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return schema.get("type", "any")


def _example(schema: Json, schemas: Json) -> Any:
    """Return a body that is valid: the examples of the fields that it must have."""
    schema = _resolved(schema, schemas)
    if schema.get("examples"):
        return schema["examples"][0]
    if "properties" in schema:
        required = schema.get("required", ())
        return {
            name: _example(part, schemas)
            for name, part in schema["properties"].items()
            if name in required or part.get("examples")
        }
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _example(schema[key][0], schemas)
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}), schemas)]
    return {"string": "text", "integer": 1, "number": 1.0, "boolean": True}.get(
        schema.get("type", "string"), "text"
    )
