"""The command line: one command per module, imported when it is called.

`packhorse --help` imports none of them, and torch only the command that needs it. An error that the
user can correct is one line on stderr and its own exit code (2); an interruption is 130, a closed
pipe 141 as for any filter, an internal error 1 with the way to see its traceback.

Other packages add commands by entry points of the group `packhorse.commands`: the name is that of
the command, the value "module:function" or "module:app". A module that must see the command line
before it is parsed has a function `prepare_tokens(tokens)`, which returns the tokens to parse.
"""

import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import entry_points

from cyclopts import App, CycloptsError

from packhorse import __version__
from packhorse.cli.console import json_alone, note, one_line
from packhorse.errors import InputError, PackhorseError
from packhorse.processor import limit

# The line in `packhorse --help` stands here, so that printing it imports no command.
COMMANDS = {
    "demo": ("packhorse.cli.demo:demo", "See real texts encoded packed and padded, side by side."),
    "run": ("packhorse.cli.run:run", "Encode texts, or measure how fast they are encoded."),
    "pack": ("packhorse.cli.pack:pack", "Plan how sequences share rows, from lengths alone."),
    "waste": ("packhorse.cli.waste:waste", "Show what padding costs on your own texts."),
    "prove": ("packhorse.cli.prove:prove", "Test that no result depends on its neighbours."),
    "data": ("packhorse.cli.data:app", "Build datasets of packed rows, and look into them."),
    "train": ("packhorse.cli.train:train", "Train packed BERT, or fine-tune it for a task."),
    "submit": ("packhorse.cli.submit:submit", "Train with seed after seed, logged for MLPerf."),
    "evaluate": ("packhorse.cli.evaluate:evaluate", "Score a model on a task with known answers."),
    "serve": ("packhorse.cli.serve:serve", "Serve models over HTTP, and a page to try them."),
    "inspect": ("packhorse.cli.inspect:inspect", "Show what a checkpoint of any format holds."),
    "convert": ("packhorse.cli.convert:convert", "Write a checkpoint in another format."),
    "verify": ("packhorse.cli.verify:verify", "Compare two checkpoints, tensors and outputs."),
    "onnx": ("packhorse.cli.onnx:app", "Rewrite an ONNX model so that it takes packed rows."),
    "freeze": ("packhorse.cli.freeze:freeze", "Make a frozen graph of a TensorFlow checkpoint."),
    "monitor": ("packhorse.cli.monitor:monitor", "Watch devices and running packhorse processes."),
    "doctor": ("packhorse.cli.doctor:doctor", "Say what can run here, and how to fix the rest."),
}
GROUP = "packhorse.commands"
# Commands of packages that belong to Packhorse; each package is an extra of the command's name.
PLUGINS = {
    "port": "Run a script written for PopTorch or TensorFlow-IPU.",
    "bench": "Measure encoders and packers, ours and others.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (the process's own by default) name; the exit code."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    command = next((token for token in tokens if not token.startswith("-")), None)
    _forgive_encodings()
    try:
        limit()  # before a command loads torch
        tokens = _prepared(command, tokens)
        with _warnings_as_notes(), json_alone() if "--json" in tokens else nullcontext():
            app = _app(command)
            app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return 0
    except PackhorseError as error:
        return _fail(error, error.exit_code)
    except CycloptsError as error:
        return _fail(f"{_without_stop(one_line(error))}; see `{_command(tokens)} --help`", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it something that is open.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("PACKHORSE_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"unexpected {what} (PACKHORSE_TRACEBACK=1 shows where)", 1)


def _without_stop(sentence: str) -> str:
    """But an ellipsis stays."""
    return sentence if sentence.endswith("..") else sentence.removesuffix(".")


def _command(tokens: Sequence[str]) -> str:
    """The command that was meant, as far as it is one: `packhorse data build`."""
    words = [token for token in tokens if not token.startswith("-")]
    place, _ = _commands(words[0] if words else None).get(words[0] if words else "", ("", ""))
    depth = 0 if not place else 1 + place.endswith(":app")
    return " ".join(["packhorse", *words[:depth]])


def _commands(command: str | None) -> dict[str, tuple[str, str]]:
    """Place and help line of every command; entry points are read only if `command` needs them."""
    if command in COMMANDS:
        return COMMANDS
    plugins = {
        entry.name: (entry.value, PLUGINS.get(entry.name, f"From the package {entry.dist.name}."))
        for entry in entry_points(group=GROUP)
        if entry.dist is not None
    }
    absent = {
        name: (f"{__name__}:_not_installed", f"{line} Needs: pip install 'packhorse[{name}]'")
        for name, line in PLUGINS.items()
    }
    return COMMANDS | absent | plugins


def _not_installed() -> None:
    """The place of a command whose package is absent; `_prepared` refuses before it is called."""


def _prepared(command: str | None, tokens: list[str]) -> list[str]:
    """The tokens to parse; raises InputError if the command's package is not installed."""
    if command in COMMANDS or command not in (commands := _commands(command)):
        return tokens
    module, _, function = commands[command][0].partition(":")
    if function == _not_installed.__name__:
        raise InputError(
            f"`packhorse {command}` is a package of its own; "
            f"install it with: pip install 'packhorse[{command}]'"
        )
    prepare = getattr(import_module(module), "prepare_tokens", None)
    return tokens if prepare is None else prepare(tokens)


def _app(command: str | None) -> App:
    """All commands; the one that is called brings its own help, which is longer."""
    app = App(
        name="packhorse",
        version=__version__,
        help="BERT without padding: sequences laid end to end, exact and fast, on CPU and CUDA.",
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for name, (place, line) in _commands(command).items():
        app.command(place, name=name, help=None if name == command else line)
    return app


def _fail(message: object, code: int) -> int:
    note(f"packhorse: {message}")
    return code


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """A warning is a line like any other, not a line of source code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: note(f"warning: {message}")
        yield


def _forgive_encodings() -> None:
    """A character that the terminal lacks is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
