"""Custom operations: computed by the stand-ins that a user registers, in Python or in C++."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import packhorse_port as poptorch
from packhorse_port import custom_ops
from packhorse_port.check import examine


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)

    def forward(self, x, y=None):
        (out,) = poptorch.custom_op(
            [self.line(x)], "Cube", "com.acme", 1, example_outputs=[x], attributes={"factor": 2.0}
        )
        return out if y is None else (out, nn.functional.mse_loss(out, y))


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(custom_ops, "_stand_ins", {})
    monkeypatch.setattr(custom_ops, "_files_run", set())


def test_a_stand_in_is_computed_and_trained_through():
    @poptorch.registerCustomOp("Cube", "com.acme")
    def cube(x, factor):
        return factor * x**3

    torch.manual_seed(0)
    model = Cubed()
    expected = nn.Linear(3, 3)
    expected.load_state_dict(model.line.state_dict())
    x, y = torch.randn(2, 4, 3)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    out, loss = training(x, y)
    plain = 2.0 * expected(x) ** 3
    plain_loss = nn.functional.mse_loss(plain, y)
    plain_loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close((out, loss), (plain.detach(), plain_loss.detach()))
    torch.testing.assert_close(model.line.weight.detach(), expected.weight.detach())
    assert cube(torch.ones(1), 1.0) == 1  # the decorator returns the function


def test_an_operation_in_cpp_is_a_stand_in():
    poptorch.registerCustomOp("Sign", "com.acme")(torch.ops.aten.sign)
    x = torch.tensor([-2.0, 0.0, 3.0])
    (out,) = poptorch.custom_op([x], "Sign", "com.acme", 1, example_outputs=[x])
    assert out.tolist() == [-1, 0, 1]


def test_one_without_a_stand_in_is_named():
    model = poptorch.inferenceModel(Cubed())
    with pytest.raises(
        poptorch.Error, match=r"com\.acme\.Cube .*registerCustomOp\(\"Cube\", \"com"
    ):
        model(torch.ones(1, 3))
    poptorch.registerCustomOp("Cube", "com.acme")(lambda x, factor: [x, x])
    with pytest.raises(poptorch.Error, match="returned 2 tensors; example_outputs has 1"):
        model(torch.ones(1, 3))
    with pytest.raises(poptorch.Error, match="register a function"):
        poptorch.registerCustomOp("Cube", "com.acme")(3)  # pyright: ignore[reportArgumentType]


def test_files_that_the_environment_names_register_stand_ins(tmp_path, monkeypatch):
    file = tmp_path / "ops.py"
    file.write_text(
        "import packhorse_port as poptorch\n"
        '@poptorch.registerCustomOp("Cube", "com.acme")\n'
        "def cube(x, factor):\n"
        "    return x**3\n"
    )
    script = tmp_path / "script.py"
    text = b"import poptorch\npoptorch.custom_op([], 'Cube', 'com.acme', 1, [])\n"
    assert examine(text, script).count("fails") == 1
    monkeypatch.setenv("PACKHORSE_PORT_OPS", str(file))
    x = torch.full((2,), 3.0)
    example = [x]
    (out,) = poptorch.custom_op([x], "Cube", "com.acme", 1, example, {"factor": 1.0})
    assert out.tolist() == [27, 27]
    assert examine(text, script).count("fails") == 0
    monkeypatch.setenv("PACKHORSE_PORT_OPS", str(tmp_path / "none.py"))
    with pytest.raises(poptorch.Error, match=r"none\.py, which does not exist"):
        poptorch.custom_op([x], "Cube", "com.acme", 1, example)


def test_the_guide_shows_one_that_works():
    guide = Path(__file__).parents[3] / "docs" / "guides" / "port.md"
    (block,) = re.findall(r"^```python\n(.*?)^```$", guide.read_text("utf-8"), re.M | re.S)
    exec(compile(block, str(guide), "exec"), {"__name__": "guide"})
    x = torch.tensor([-2.0, 3.0])
    (out,) = poptorch.custom_op([x], "LeakyRelu", "com.acme", 1, [x], {"alpha": 0.1})
    torch.testing.assert_close(out, torch.nn.functional.leaky_relu(x, 0.1))
