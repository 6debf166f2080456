"""Training recipes that come with the package, known by name: `packhorse train --config mini`.

A recipe is a TOML file of settings (`train.settings`); the comments at its top say what it trains
and on which data.
"""

from __future__ import annotations

from pathlib import Path

from packhorse.errors import InputError

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def summary(name: str) -> str:
    """What a recipe trains: the first line of its file."""
    return find(Path(name)).read_text("utf-8").partition("\n")[0].removeprefix("# ")


def find(config: Path) -> Path:
    """The file of a recipe that is given by its name or as the path of a file.

    A name has neither a folder nor a suffix, so a file of the user's never hides a recipe by
    accident, whatever the current folder holds.
    """
    is_word = config == Path(config.name) and not config.suffix
    if is_word and config.name in names():
        return FOLDER / f"{config.name}.toml"
    if config.exists():
        return config
    known = ", ".join(names())
    if is_word:
        raise InputError(f"there is no recipe {config.name!r}; name a file, or one of {known}")
    if config.stem in names():
        raise InputError(f"there is no file {config}; write --config {config.stem} for the recipe")
    raise InputError(f"there is no file {config}; recipes by name are {known}")
