"""Command-line flags made from a settings dataclass, for `train`, `submit` and `serve`.

Names, help texts, groups and choices stand in the dataclass alone (`packhorse.settings`); here they
become parameters of cyclopts. A flag that was not passed is None, so that a default on the command
line never overrides a value from a file or from the environment.
"""

from dataclasses import asdict, field, make_dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from packhorse.settings import SettingField, setting_fields

SWITCH = Parameter(negative="", show_default=False)
PrintConfig = Annotated[bool, SWITCH, Parameter(help="Print the settings as TOML and exit.")]


def flags_class(settings: type, *, negatives: bool, consume_multiple: bool) -> Any:
    """A dataclass with the fields of `settings`, all optional, as parameters of a command.

    negatives: every switch --x has a --no-x. consume_multiple: a list takes all words that follow
    its flag (--clamp 1 3), for commands that take no words without one; else the flag is repeated.
    """
    specs = setting_fields(settings).values()
    groups = list(dict.fromkeys(spec.group for spec in specs))

    def annotation(spec: SettingField) -> Any:
        type_ = spec.type if spec.item_type is None else list[spec.item_type]
        parameter = Parameter(
            name=(spec.flag, *spec.flags),
            group=Group(spec.group, sort_key=1 + groups.index(spec.group)),
            help=spec.help,
            show_default=False,
            negative=spec.negative or ("" if spec.type is bool and not negatives else None),
            negative_iterable=(),
            consume_multiple=consume_multiple,
        )
        return Annotated[type_ | None, parameter]

    return Parameter(name="*")(
        make_dataclass(
            f"{settings.__name__}Flags",
            [(spec.name, annotation(spec), field(default=None)) for spec in specs],
            # cyclopts takes a class of its own or of the standard library for a plain value.
            namespace={"__module__": __name__},
            frozen=True,
            kw_only=True,
        )
    )


def passed(flags: Any) -> dict[str, Any]:
    """The settings that were passed as flags, by name."""
    return {name: value for name, value in asdict(flags).items() if value is not None}
