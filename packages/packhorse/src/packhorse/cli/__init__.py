"""The command line: one command per module, imported when it is called.

`packhorse --help` imports none of them, and only commands that need torch import it. An error that
the user can correct is one line on stderr with its own exit code (usually 2). Ctrl-C exits with
130, a closed pipe with 141 as for any filter, and an internal error with 1; its message says how to
see the traceback.

Other packages add commands by entry points of the group `packhorse.commands`: the name is that of
the command, the value "module:function" or "module:app". A module that must see the command line
before it is parsed has a function `prepare_tokens(tokens)`, which returns the tokens to parse.

Internal: the commands, their flags and that group are public, these modules are not.
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
from packhorse.cli.console import note, one_line, reserve_stdout_for_json
from packhorse.errors import InputError, PackhorseError
from packhorse.processor import limit

# The lines of `packhorse --help` are here, so that printing them imports no command.
COMMANDS = {
    "demo": ("packhorse.cli.demo:demo", "Encode real texts packed and padded, and compare."),
    "run": ("packhorse.cli.run:run", "Encode texts, or measure the speed of encoding."),
    "pack": ("packhorse.cli.pack:pack", "Plan how sequences share rows, from their lengths."),
    "waste": ("packhorse.cli.waste:waste", "Show what padding costs for your own texts."),
    "prove": ("packhorse.cli.prove:prove", "Test that no result depends on its neighbors."),
    "data": ("packhorse.cli.data:app", "Build datasets of packed rows, and look into them."),
    "train": ("packhorse.cli.train:train", "Train packed BERT, or fine-tune it for a task."),
    "submit": ("packhorse.cli.submit:submit", "Train once per seed, with logs for MLPerf."),
    "evaluate": ("packhorse.cli.evaluate:evaluate", "Score a model on a task with known answers."),
    "serve": ("packhorse.cli.serve:serve", "Serve models over HTTP, with a page to try them."),
    "inspect": (
        "packhorse.cli.inspect:inspect",
        "Show the contents of a checkpoint of any format.",
    ),
    "convert": ("packhorse.cli.convert:convert", "Write a checkpoint in another format."),
    "quantize": (
        "packhorse.cli.quantize:quantize",
        "Write a model in int8, and say what that costs.",
    ),
    "verify": (
        "packhorse.cli.verify:verify",
        "Compare two checkpoints, or vectors with those you have.",
    ),
    "onnx": ("packhorse.cli.onnx:app", "Rewrite an ONNX model to take packed rows."),
    "freeze": ("packhorse.cli.freeze:freeze", "Make a frozen graph from a TensorFlow checkpoint."),
    "monitor": ("packhorse.cli.monitor:monitor", "Watch devices and running packhorse processes."),
    "doctor": ("packhorse.cli.doctor:doctor", "Show what can run here, and how to fix the rest."),
}
GROUP = "packhorse.commands"
# Commands of packages that belong to Packhorse; each package is an extra of the command's name.
PLUGINS = {
    "port": "Run a script written for PopTorch or TensorFlow-IPU.",
    "bench": "Measure encoders and packers, ours and others.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: those of the process); returns the exit code."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    command = next((token for token in tokens if not token.startswith("-")), None)
    _escape_unencodable()
    try:
        limit()  # applies PACKHORSE_CPU, which works only before a command loads torch
        tokens = _prepare_tokens(command, tokens)
        with (
            _warnings_as_notes(),
            reserve_stdout_for_json() if "--json" in tokens else nullcontext(),
        ):
            app = _app(command)
            app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return 0
    except PackhorseError as error:
        return _fail(error, error.exit_code)
    except CycloptsError as error:
        return _fail(f"{_without_period(one_line(error))}; see `{_command(tokens)} --help`", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it something that is open.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("PACKHORSE_TRACEBACK"):
            raise
        message = f"unexpected {type(error).__name__}: {error} (PACKHORSE_TRACEBACK=1 shows where)"
        return _fail(message, 1)


def _without_period(sentence: str) -> str:
    """Remove the period at the end, but not an ellipsis."""
    return sentence if sentence.endswith("..") else sentence.removesuffix(".")


def _command(tokens: Sequence[str]) -> str:
    """Return the command that was called, without its arguments: `packhorse data build`."""
    words = [token for token in tokens if not token.startswith("-")]
    commands = _commands(words[0] if words else None)
    if not words or words[0] not in commands:
        return "packhorse"
    location, _ = commands[words[0]]
    depth = 2 if location.endswith(":app") else 1  # an app has subcommands
    return " ".join(["packhorse", *words[:depth]])


def _commands(command: str | None) -> dict[str, tuple[str, str]]:
    """Return location and help line of each command.

    Entry points are read only if `command` is not one of ours: that takes milliseconds.
    """
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
    """Stand in for a command whose package is absent; `_prepare_tokens` refuses to call it."""


def _prepare_tokens(command: str | None, tokens: list[str]) -> list[str]:
    """Return the tokens to parse; raises InputError if the command's package is not installed."""
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
    """Return the app with all commands; the one that is called shows its own, longer help."""
    app = App(
        name="packhorse",
        version=__version__,
        help=(
            "BERT without padding: sequences laid end to end, each answered as if alone, "
            "on CPU and CUDA."
        ),
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for name, (location, line) in _commands(command).items():
        app.command(location, name=name, help=None if name == command else line)
    return app


def _fail(message: object, code: int) -> int:
    note(f"packhorse: {message}")
    return code


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print a warning as one line, without the line of source code that raised it."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *location: note(f"warning: {message}")
        yield


def _escape_unencodable() -> None:
    """Print characters that the terminal lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
