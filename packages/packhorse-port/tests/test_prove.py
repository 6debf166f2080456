"""`--patch` writes loops, and `--prove` shows that they take the same steps."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import packhorse_port
from packhorse.errors import InputError
from packhorse_port import prove as proving
from packhorse_port.patch import translate
from packhorse_port.project import Project
from packhorse_port.prove import ProofFailed, prove

NET = """\
import poptorch
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(5, 2)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, y=None):
        out = self.dropout(self.line(x))
        if y is None:
            return out
        return out, poptorch.identity_loss(torch.nn.functional.mse_loss(out, y), "none")
"""
TRAIN = """\
import poptorch
import torch
from net import Net

opts = poptorch.Options().deviceIterations(2)
opts.Training.gradientAccumulation(4)
net = Net()
optimizer = poptorch.optim.AdamW(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(96, 5), torch.randn(96, 2))
loader = poptorch.DataLoader(opts, data, batch_size=4, shuffle=True)
model = poptorch.trainingModel(net, opts, optimizer)
for epoch in range(2):
    for x, y in loader:
        out, loss = model(x, y)
    model.setOptimizer(optimizer)
    net.eval()
    answers = poptorch.inferenceModel(net)
    print(answers(data.tensors[0]).shape)
"""


def plain(text: str) -> str:
    return translate(dedent(text).encode(), "script.py").text


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_a_loop_takes_the_same_steps(cli, script: Path, monkeypatch) -> None:
    result = cli("port", "--json", "--prove", script)
    assert result.code == 0, result.err
    assert result.document["equal"] and len(result.document["steps"]) == proving.STEPS
    for step in result.document["steps"]:
        assert step["loss"] == pytest.approx(step["plain_loss"], abs=1e-6)
        assert step["weights"] <= 1e-6
    # The control: a translation that forgets to divide the loss by its micro batches.
    wrong = translate(TRAIN.encode(), "train.py").text.replace("(loss / 4)", "loss")
    assert "(loss / 4)" not in wrong
    original = translate

    def careless(source: bytes, name: str):
        patched = original(source, name)
        return type(patched)(wrong, ()) if name == "train.py" else patched

    monkeypatch.setattr("packhorse_port.patch.translate", careless)
    refused = cli("port", "--prove", script)
    assert refused.code == 1 and "differ" in refused.err


def test_a_call_becomes_the_loop_that_a_person_would_write() -> None:
    text = plain(TRAIN)
    assert "poptorch" not in text and "def " not in text
    loop = """\
    for x, y in loader:
        for x_step, y_step in zip(x.chunk(2), y.chunk(2)):
            optimizer.zero_grad()
            for x_part, y_part in zip(x_step.chunk(4), y_step.chunk(4)):
                out, loss = model(x_part.to(device), y_part.to(device))
                (loss / 4).backward()
            optimizer.step()
        out = out.detach().cpu()
        loss = loss.detach().cpu()
"""
    assert loop in text
    assert "model = net.to(device)" in text and "answers = net.to(device)" in text
    assert "    model.train()\n    for x, y" in text and "    answers.eval()\n" in text
    assert (
        "    with torch.no_grad():\n        print(answers(data.tensors[0].to(device)).cpu()" in text
    )
    assert text.count("device = torch.device(") == 1


SIMPLE = """\
import poptorch
net = Net()
o = poptorch.optim.SGD(net.parameters(), lr=1)
m = poptorch.trainingModel(net, None, o)
{}
"""


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("loss = m(x)", "loss.backward()"),
        ("_, total_loss = m(x, labels=y)", "_, total_loss = m(x.to(device), labels=y.to(device))"),
        (
            "out, loss = m(batch['x'], f(y))",
            "out, loss = m(batch['x'].to(device), f(y).to(device))",
        ),
    ],
)
def test_calls_that_become_loops(call: str, line: str) -> None:
    text = plain(SIMPLE.format(call))
    assert line in text and "o.zero_grad()" in text and "o.step()" in text
    assert "functools" not in text
    compile(text, "plain.py", "exec")


@pytest.mark.parametrize(
    "rest",
    [
        "out = m(x)",  # which is the loss?
        "print(m(x))",
        "loss = m(*batch)",
        "train(m)\nloss = m(x)",
        "m.setOptimizer(other)\nloss = m(x)",
        "def f(x):\n    loss = m(x)\ndef g():\n    m = 3",
        "loss = m(x)\nm = poptorch.inferenceModel(net)",
        "aux_loss, total = m(x)",
        "for x in data: loss = m(x)",
        "loss = m(x); print(loss)",
    ],
)
def test_what_a_loop_cannot_say_is_left_to_functions(rest: str) -> None:
    text = plain(SIMPLE.format(rest))
    kept = "functools.partial(train_once, net, optimizer=o)" in text
    assert kept or "def f" in rest


ALIKE = f"""\
{NET}
torch.manual_seed(0)
net = Net()
x, y = torch.randn(32, 5), torch.randn(32, 2)
optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
"""
BOTH = """\
training = poptorch.trainingModel(net, None, optimizer)
net.eval()
answers = poptorch.inferenceModel(net)
def validate():
    return answers(x)
"""


@pytest.mark.parametrize(
    "rest",
    [
        # An executor keeps its mode, whatever is validated in between
        f"{BOTH}for i in range(3):\n    out, loss = training(x, y)\n    print(validate().sum())",
        f"{BOTH}for i in range(3):\n    out, loss = training(x, y)\n    net.eval()",
        """\
        training = poptorch.trainingModel(net, None, optimizer)
        for i in range(3):
            out, loss = training(x, y)
            net.eval()
        """,
        # None changes where the script does not
        """\
        training = poptorch.trainingModel(net, None, optimizer)
        answers = poptorch.inferenceModel(net)
        out, loss = training(x, y)
        print(answers(x).eq(0).any())
        """,
        # One loss for each of the batches
        """\
        net.eval()
        answers = poptorch.inferenceModel(net, poptorch.Options().deviceIterations(4))
        out, loss = answers(x, y)
        print(loss)
        """,
        "answers = poptorch.inferenceModel(net.eval())\n"
        "def rows():\n    yield answers(x)\nfor row in rows():\n"
        "    loss = torch.is_grad_enabled()\n    print(loss)",
        "training = poptorch.trainingModel(net, None, optimizer)\n"
        "for i in range(2):\n\tout, loss = training(x, y)\n\tprint(loss)",
        # Names of parts of two inputs
        """\
        class Both(Net):
            def forward(self, a, b, y):
                return super().forward(a - 2 * b, y)
        net = Both()
        x_step = 2 * x
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        options = poptorch.Options().deviceIterations(2)
        training = poptorch.trainingModel(net, options, optimizer)
        out, loss = training(x, x_step, y)
        """,
    ],
)
def test_the_translation_prints_and_computes_the_same(rest: str, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "poptorch", packhorse_port)
    monkeypatch.setenv("PACKHORSE_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = f"{ALIKE}{dedent(rest)}\nprint(loss, net.line.weight.sum())\n"
    patched = translate(text.encode(), "script.py")
    assert not patched.untranslated and "poptorch" not in patched.text
    printed = []
    for script in (text, patched.text):
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    assert printed[0] and printed[0] == printed[1]


def test_a_translation_keeps_the_encoding_that_its_first_line_names() -> None:
    source = '# coding: latin-1\nimport poptorch\nname = "½"\n'.encode("latin-1")
    scope = {}
    exec(compile(translate(source, "a.py").encode(), "a.py", "exec"), scope)
    assert scope["name"] == "½"


def test_modes_that_a_translation_cannot_keep_are_marked() -> None:
    part = translate(f"{ALIKE}{BOTH}net.line.eval()\nloss = training(x, y)\n".encode(), "a.py")
    assert ["the mode of a part" in reason for _, reason in part.untranslated] == [True]
    passed = translate(f"{ALIKE}{BOTH}fit(training)\n".encode(), "a.py")
    assert ["it keeps its mode" in reason for _, reason in passed.untranslated] == [True]


def test_scripts_that_cannot_be_proven_say_why(cli, script: Path, tmp_path: Path) -> None:
    script.write_text("import poptorch\nraise ValueError('no data')\n")
    with pytest.raises(ProofFailed, match="did not get to its first optimizer step: ValueError"):
        prove(Project.of(script), [])
    for words, part in (
        (["--prove", tmp_path], "one script"),
        (["--prove", "--check", script], "a command of its own"),
    ):
        refused = cli("port", *words)
        assert refused.code == 2 and part in refused.err
    with pytest.raises(InputError):
        translate(b"import (", "broken.py")
