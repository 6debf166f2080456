"""`--patch` writes the plain PyTorch script: its text, its numbers, and what it leaves."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import packhorse_port
from packhorse.errors import InputError
from packhorse_port import plain
from packhorse_port.enums import DataLoaderMode
from packhorse_port.patch import MARK, plain_functions, translate


def patched(text: str) -> str:
    """The script without the functions that were put at its top."""
    completed = translate(dedent(text).encode(), "script.py")
    assert completed.untranslated == ()
    return below(completed.text)


def below(text: str) -> str:
    for function in plain_functions(
        {"call_training", "call_inference", "train_once", "infer_once"}
    ).values():
        text = text.replace(function, "")
    return "\n".join(line for line in text.splitlines() if line.strip()) + "\n"


def test_a_script_without_poptorch_stays_as_it_is() -> None:
    text = "# a comment\nimport torch\n\n\nprint( torch.zeros(1) )  # ½\n"
    assert translate(text.encode(), "a.py").text == text


WHOLE = """\
    import torch, poptorch
    from poptorch.optim import AdamW  # theirs

    opts = poptorch.Options().randomSeed(42)
    opts.deviceIterations(4)  # steps
    opts.Training.gradientAccumulation(args.accumulate)
    opts.Precision.enableStochasticRounding(True)
    loader = poptorch.DataLoader(
        opts,
        data,  # ours
        batch_size=8,
        mode=poptorch.DataLoaderMode.Async,
    )
    optimizer = AdamW(net.parameters(), lr=1e-3, loss_scaling=1024)
    model = poptorch.trainingModel(net, opts, optimizer)
    model.compile(*next(iter(loader)))
    print(model(x).numel(), loader.combinedBatchSize, opts.device_iterations)
    torch.save(model.state_dict(), "net.pth")
    model.setOptimizer(other)
"""


def test_options_act_where_they_are_used() -> None:
    assert patched(WHOLE) == dedent("""\
        import torch
        import functools
        from typing import Any
        torch.manual_seed(42)
        loader = torch.utils.data.DataLoader(
            data,  # ours
            batch_size=8 * 4 * args.accumulate, drop_last=True,
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        model = functools.partial(call_training, net, optimizer=optimizer, iterations=4, accumulation=args.accumulate)
        print(model(x).numel(), loader.batch_size, 4)
        torch.save(model.args[0].state_dict(), "net.pth")
        model.keywords.update(optimizer=other)
        """)  # noqa: E501


@pytest.mark.parametrize(
    ("line", "plain_line"),
    [
        ("y = poptorch.identity_loss(a + b, reduction='mean')", "y = (a + b).mean()"),
        ("y = poptorch.identity_loss(f(a), 'sum')", "y = f(a).sum()"),
        ("y = poptorch.identity_loss(a)", "y = a"),
        ("y = poptorch.recomputationCheckpoint(a, b)", "y = (a, b)"),
        ("y = poptorch.ipu_print_tensor(a, 'a') + 1", "y = a + 1"),
        ("y = 2 * poptorch.nop(a + b)", "y = 2 * (a + b)"),
        ("y = poptorch.nop(a + b)", "y = a + b"),
        ("net.l = poptorch.BeginBlock(net.l, ipu_id=1)", "net.l = net.l"),
        ("if poptorch.ipuHardwareIsAvailable(): f()", "if False: f()"),
        ("if a: poptorch.setLogLevel('ERR')", "if a: pass"),
        ("if a: poptorch.Block.start('b', ipu_id=1)", "if a: pass"),
        ("d = poptorch.AsynchronousDataAccessor(x); d.terminate()", "d = x; pass"),
        ("a = 1; poptorch.setLogLevel('ERR')", "a = 1; pass"),
        ("with poptorch.Block('b', ipu_id=0): f()", "with contextlib.nullcontext(): f()"),
        ("def f(o: poptorch.Options): pass", "def f(o: object): pass"),
        (
            "d = poptorch.DataLoader(poptorch_options, x, 4 + n, True, 8)",
            "d = torch.utils.data.DataLoader(x, batch_size=4 + n, shuffle=True, "
            "num_workers=min(8, os.cpu_count() or 1), persistent_workers=True, drop_last=True)",
        ),
        (
            "d = poptorch.DataLoader(dataset=x, num_workers=n, drop_last=False)",
            "d = torch.utils.data.DataLoader(dataset=x, num_workers=min(n, os.cpu_count() or 1), "
            "drop_last=False, persistent_workers=n > 0)",
        ),
        ("i = poptorch.inferenceModel(model=net)", "i = functools.partial(infer_once, net)"),
        (
            "i = poptorch.inferenceModel(poptorch.BeginBlock(net), options=twice)",
            "i = functools.partial(call_inference, net, iterations=2)",
        ),
        (
            "i = poptorch.inferenceModel(net, poptorch.Options().deviceIterations(n + 1))",
            "i = functools.partial(call_inference, net, iterations=n + 1)",
        ),
        ("train(net, twice)", "train(net, None)"),
        ("print(poptorch.__version__)", 'print("3.3.0")'),
        ("v = int(poptorch.__version__.split('.')[0])", "v = int(\"3.3.0\".split('.')[0])"),
        ("""print(f"'{ poptorch.__version__ }' {a}")""", """print(f"'3.3.0' {a}")"""),
        ("from poptorch import __version__ as v; print(v)", 'pass; print("3.3.0")'),
        (
            "d = poptorch.DataLoader(None, x, 4, async_options={'early_preload': False})",
            "d = torch.utils.data.DataLoader(x, batch_size=4, drop_last=True)",
        ),
    ],
)
def test_lines(line: str, plain_line: str) -> None:
    text = "import poptorch\npoptorch_options = poptorch.Options()\n"
    text += "twice = poptorch_options.clone().deviceIterations(2)\n"
    assert patched(text + line).splitlines()[-1] == plain_line


def test_a_block_is_never_left_empty() -> None:
    text = """\
        import poptorch
        def options():
            poptorch.setLogLevel("ERR")
        if a:
            strategy = poptorch.PipelinedExecution("b")
            strategy.stage("b").ipu(1)
        class Net:
            @poptorch.BlockFunction("b", ipu_id=1)
            def forward(self): return 1
        """
    completed = patched(text)
    assert (
        completed.count("pass") == 2
        and "BlockFunction" not in completed
        and "stage" not in completed
    )
    ast.parse(completed)


def test_what_stands_under_main_is_under_no_condition() -> None:
    script = "import poptorch\nif __name__ == '__main__':\n    opts = poptorch.Options()\n"
    script += "    opts.deviceIterations(4)\n    d = poptorch.DataLoader(opts, x, batch_size=2)\n"
    result = translate(script.encode(), "script.py")
    assert not result.untranslated and "batch_size=2 * 4" in result.text


def test_options_out_of_a_function_stay_whole() -> None:
    script = "import poptorch\ndef f(n):\n    opts = poptorch.Options()\n"
    script += "    opts.deviceIterations(n)\n    return opts\nopts = f(3)\n"
    result = translate(script.encode(), "script.py")
    assert [line for line, _ in result.untranslated][:2] == [3, 4]
    assert "opts = poptorch.Options()" in result.text


def test_options_that_change_later_count_from_there() -> None:
    text = """\
        import poptorch
        opts = poptorch.Options()
        a = poptorch.DataLoader(opts, x, batch_size=1)
        opts = opts.clone().deviceIterations(3).replicationFactor(2)
        b = poptorch.DataLoader(opts, x, batch_size=1)
        c = poptorch.DataLoader(opts, x)
        """
    completed = patched(text)
    assert "a = torch.utils.data.DataLoader(x, batch_size=1, drop_last=True)" in completed
    assert "b = torch.utils.data.DataLoader(x, batch_size=1 * 6, drop_last=True)" in completed
    assert "c = torch.utils.data.DataLoader(x, batch_size=6, drop_last=True)" in completed


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("y = poptorch.custom_op([x], 'Cube', 'c', 1)", "custom_op"),
        ("o = poptorch.optim.LAMB(p)", "LAMB"),
        ("o = poptorch.optim.AdamW(p, bias_correction=False)", "has no bias_correction"),
        ("d = poptorch.DataLoader(make_options(), x)", "the value of make_options() is not known"),
        ("d = poptorch.DataLoader(*arguments)", "not written out"),
        ("if fast: opts.deviceIterations(8)", "under a condition"),
        ("opts.enableSyntheticData(True)", "data of the first call"),
        ("print(model.getLatency())", "seconds of a call"),
        ("print(model.getLatency(), other.getLatency())", "seconds of a call"),
        ("print(f'{poptorch.__version__:>9}')", "__version__: inside an f-string"),
    ],
)
def test_what_cannot_be_translated_is_marked_and_reported(line: str, part: str) -> None:
    text = (
        "import poptorch\nopts = poptorch.Options()\nmodel = poptorch.inferenceModel(net, opts)\n"
    )
    completed = translate((text + line + "\n").encode(), "script.py")
    ((number, reason),) = completed.untranslated
    assert number == 4 and part in reason
    *_, mark, stored = below(completed.text).splitlines()
    assert mark == MARK + reason and stored == line
    ast.parse(completed.text)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("print(model.getLatency(), model.getPerfCounters())", ["getLatency", "getPerfCounters"]),
        ("model.getLatency(); poptorch.cond(a)", ["getLatency", "cond"]),
        ("opts.enableSyntheticData(True).useOfflineIpuTarget()", ["Synthetic", "useOffline"]),
        (
            "o = poptorch.optim.AdamW(p, max_grad_norm=1, bias_correction=False)",
            ["no max_grad_norm", "no bias_correction"],
        ),
    ],
)
def test_all_that_is_left_of_a_line_is_reported(line: str, parts: list[str]) -> None:
    text = (
        "import poptorch\nopts = poptorch.Options()\nmodel = poptorch.inferenceModel(net, opts)\n"
    )
    completed = translate((text + line).encode(), "script.py")
    assert [number for number, _ in completed.untranslated] == [4] * len(parts)
    assert all(
        part in reason for part, (_, reason) in zip(parts, completed.untranslated, strict=True)
    )
    marks = [MARK + reason for _, reason in completed.untranslated]
    assert below(completed.text).splitlines()[-len(parts) - 1 :] == [*marks, line]


@pytest.mark.parametrize(
    "call",
    [
        "DataLoader(None, x, shuffle=True, async_options={'early_preload': True})",
        "DataLoader(None, x, async_options=made_elsewhere)",
        "AsynchronousDataAccessor(x, early_preload=True)",
    ],
)
def test_an_order_that_is_drawn_early_is_reported(call: str) -> None:
    completed = translate(f"import poptorch\nd = poptorch.{call}\n".encode(), "script.py")
    ((number, reason),) = completed.untranslated
    assert number == 2 and "early_preload" in reason and "poptorch." not in completed.text


EPOCHS = """\
    import torch, poptorch
    torch.manual_seed(5)
    x = torch.randn(48, 3)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    opts = poptorch.Options().deviceIterations(2)
    loader = poptorch.DataLoader(
        opts, data, batch_size=4, shuffle=True, mode=poptorch.DataLoaderMode.Async
    )
    net = Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5)
    model = poptorch.trainingModel(net, opts, optimizer)
    losses = [float(model(a, b)[1]) for epoch in range(3) for a, b in loader]
    loader.terminate()
"""


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("mode", DataLoaderMode)
def test_both_ways_train_alike(mode: DataLoaderMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands and translated; the orders of all epochs are the same in every mode."""
    monkeypatch.setitem(sys.modules, "poptorch", packhorse_port)
    monkeypatch.setenv("PACKHORSE_DEVICE", "cpu")
    text = dedent(EPOCHS).replace("Async", mode.name)
    packhorse_result, translated_result = {"Net": Pair}, {"Net": Pair}
    exec(text, packhorse_result)
    completed = translate(text.encode(), "script.py")
    assert completed.untranslated == ()
    exec(completed.text, translated_result)
    assert packhorse_result["losses"] == pytest.approx(translated_result["losses"], rel=1e-5)


def test_wrong_scripts_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be parsed as Python"):
        translate(b"print 'old'", "a.py")
    with pytest.raises(InputError, match="train_once of its own"):
        translate(
            b"import poptorch\ndef train_once(): pass\nm = poptorch.trainingModel(n, optimizer=o)",
            "a.py",
        )


# The functions that are written into the script


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, also: Any = None) -> Any:
        out = self.line(x)
        return {"out": out}, torch.nn.functional.cross_entropy(out, y), "word"


class Pair(Net):
    """Two results, one of them drawn: what a loader draws must not shift it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # pyright: ignore
        out = torch.nn.functional.dropout(self.line(x), 0.2)
        return out, torch.nn.functional.cross_entropy(out, y)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(24, 3), torch.arange(24) % 2


@pytest.mark.parametrize("mean", [True, False])
def test_a_call_is_steps_of_micro_batches(data, mean: bool) -> None:
    """3 iterations of 2 micro batches of 2 replicas each, against the loop written out."""
    torch.manual_seed(1)
    packhorse_result, reference = Net(), Net()
    reference.load_state_dict(packhorse_result.state_dict())
    first, second = (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for net in (packhorse_result, reference)
    )
    outputs, losses, word = plain.call_training(
        *(packhorse_result, *data), optimizer=first, iterations=3, accumulation=2, replicas=2,
        mean=mean, outputs="all",
    )  # fmt: skip
    expected = []
    for step in range(3):
        second.zero_grad()
        for micro in range(4):
            part = slice(8 * step + 2 * micro, 8 * step + 2 * micro + 2)
            _, loss, _ = reference(data[0][part], y=data[1][part])
            (loss / 4 if mean else loss).backward()
            expected.append(loss.detach())
        second.step()
    assert torch.equal(losses, torch.stack(expected)) and word == "word"
    assert outputs["out"].shape == (24, 2) and not outputs["out"].requires_grad
    assert all(map(torch.equal, packhorse_result.parameters(), reference.parameters()))


@pytest.mark.parametrize(
    ("outputs", "period", "expected"),
    [("all", 1, range(12)), ("final", 1, [10, 11]), ("every", 3, [4, 5, 10, 11])],
)
def test_which_results_come_back(outputs: str, period: int, expected) -> None:
    """6 steps of 2 replicas, the number of each in its result."""

    def model(x):
        return x

    created = plain.call_inference(
        model, torch.arange(12), iterations=6, replicas=2, outputs=outputs, every=period
    )
    assert created.tolist() == list(expected)


def test_sums_and_scalars() -> None:
    def model(x, named):
        return [x.sum(), named["x"]]

    x = torch.arange(12.0)
    total, named = plain.call_inference(
        model, x, named={"x": x}, iterations=3, replicas=2, outputs="sum"
    )
    assert total.tolist() == [0 + 1 + 4 + 5 + 8 + 9, 2 + 3 + 6 + 7 + 10 + 11]
    assert named.tolist() == [0 + 4 + 8, 1 + 5 + 9, 2 + 6 + 10, 3 + 7 + 11]


def test_wrong_batches_and_losses_are_reported(data) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="24 cannot be divided by 5"):
        plain.call_training(net, *data, optimizer=optimizer, iterations=5)
    with pytest.raises(ValueError, match="returns 0 losses"):
        plain.train_once(net.line, data[0], optimizer=optimizer)
    assert "import packhorse" not in Path(plain.__file__).read_text()
