"""Other programs that draw a run's figures: TensorBoard, and Weights & Biases.

They get what the journal logs and are never read. A tracker that cannot be opened is refused before
the first step. One that fails later is given up with a warning, because no figure is lost by that:
the journal has all of them.

After an interruption a run takes some steps again, to the same bits. TensorBoard is told to drop
what it has of them; Weights & Biases keeps what it has and drops what comes again.
"""

# The libraries' own types are incomplete, and neither is a dependency.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final

from packhorse.errors import InputError, MissingExtra

EVENTS = "tensorboard"
RUN_ID = "wandb.txt"  # in the run's folder, so that a resumed run is the same one there
SECONDS = 60.0  # that the start and the end of a run wait for Weights & Biases

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where figures go besides the run's own files."""

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Show the figures of a step, each under its name."""
        ...

    def close(self) -> None:
        """Finish what is under way."""
        ...


@final
class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "train") from error
        self._writer = SummaryWriter(str(folder / EVENTS), purge_step=first_step)

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


@final
class WeightsAndBiases:
    """A run at wandb.ai or your own server, or in files only (WANDB_MODE=offline)."""

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb") from error
        identity = folder / RUN_ID
        is_resumed = identity.exists()
        if not is_resumed:
            identity.write_text(uuid.uuid4().hex + "\n")
        options = wandb.Settings(
            console="off",  # no copy of what the terminal shows
            disable_git=True,
            save_code=False,
            quiet=True,
            init_timeout=SECONDS,
            finish_timeout=SECONDS,
            finish_timeout_raises=False,
        )
        try:
            self._run = wandb.init(
                project=project,
                dir=folder,
                id=identity.read_text("utf-8").strip(),
                name=folder.resolve().name,
                resume="allow" if is_resumed else None,
                config=dict(settings),
                settings=options,
            )
        except wandb.Error as error:
            raise InputError(
                f"Weights & Biases does not take the run: {_first_line(error)}; log in with "
                "`wandb login`, or set WANDB_MODE=offline and send it later with `wandb sync`"
            ) from error
        self._failed = False

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log the figures; the library sends them in a process of its own."""
        if not self._failed:
            try:
                self._run.log(dict(figures), step=step)
            except Exception as error:  # that process may end, or the disk be full
                self._give_up(error)

    def close(self) -> None:
        """Wait until everything is sent, but not long."""
        if not self._failed:
            try:
                self._run.finish()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        logger.warning(
            "Weights & Biases gets no more of this run: %s; log.jsonl has all figures",
            _first_line(error),
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
