"""Settings of what a key such as ``kind`` names: those that its class or function takes.

Nothing is listed here: names, types and defaults are those of its signature, ranges those that it
checks itself.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from dataio.base.checked import nearest
from tonari.trainer.config.settings import check_known, checked_setting, missing_setting
from tonari.trainer.errors import ConfigError

Made = Callable[..., object]
"""A class or function, by whose signature a table is checked."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A key of a table that names a class, and the keys beside it that are the class's settings.

    Attributes:
        key: With its table, such as ``importance.kind``.
        kinds: What there is to name.
        elsewhere: Arguments that a file does not set under their names: where it does.
    """

    key: str
    kinds: Mapping[str, Made]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def table(self) -> str:
        return self.key.partition(".")[0]

    def takes(self, kind: str) -> dict[str, Any]:
        """List what a file may set of a kind: names, and the types of the values."""
        hints = hints_of(self.kinds[kind])
        return {name: hint for name, hint in hints.items() if name not in self.elsewhere}

    def all_settings(self) -> set[str]:
        """List what may be set of any kind."""
        return {name for kind in self.kinds for name in self.takes(kind)}

    def lists(self) -> set[str]:
        """List those of which a value is a list itself."""
        return {
            name
            for kind in self.kinds
            for name, hint in self.takes(kind).items()
            if get_origin(hint) is tuple
        }

    def check_kind(self, kind: str) -> None:
        """Refuse a kind that there is not.

        Raises:
            ConfigError: Names those that there are.
        """
        if kind not in self.kinds:
            raise ConfigError(
                f'{self.key} is "{kind}", expected one of {", ".join(map(repr, self.kinds))}, or '
                f"package.module:Name of your own; did you mean {nearest(kind, self.kinds)!r}?"
            )

    def default(self, kind: str, name: str) -> Any:
        """Find the default of a setting; `inspect.Parameter.empty`: it has none."""
        return inspect.signature(self.kinds[kind]).parameters[name].default

    def check_no_args(self, kind: str, args: Mapping[str, object]) -> None:
        """Refuse ``args`` of a kind whose settings are keys of the table.

        Raises:
            ConfigError: If there are some.
        """
        if args:
            raise ConfigError(
                f'{self.table}.args is given, but {self.key} "{kind}" takes '
                f"{', '.join(self.takes(kind))} only, each as a key of [{self.table}]; leave it "
                "out, or name a class of your own, package.module:Name"
            )

    def check_args_alone(
        self, kind: str, given: Iterable[str], *, beside: Iterable[str] = ()
    ) -> None:
        """Refuse keys of a kind of the user's, whose settings are ``args``.

        Args:
            kind: The kind.
            given: Keys of the table.
            beside: What it takes beside ``args``.

        Raises:
            ConfigError: If there are some.
        """
        takes = ", ".join(["args", *beside])
        for name in [name for name in given if name not in beside]:
            raise ConfigError(
                f'{self.table}.{name} is given, but {self.key} "{kind}" takes {takes} only; give '
                f"{self.table}.args.{name}"
            )

    def make_settings(
        self, kind: str, given: Mapping[str, object], *, hints: Mapping[str, Any] | None = None,
        beside: Iterable[str] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Check what a table sets of a kind, and make of it what the class takes.

        Args:
            kind: One of ``kinds``.
            given: By name, as the file has them.
            hints: Types of the values; defaults to those of the signature.
            beside: The table's own keys, to guess among what is misspelt.

        Raises:
            ConfigError: If the class takes no such setting, one is missing, or a value is of
                another type.
        """
        takes, table = hints or self.takes(kind), self.table
        for name in given:
            if name in self.elsewhere:
                raise ConfigError(
                    f"{table}.{name} is given, but it is set by {self.elsewhere[name]}; leave it "
                    "out"
                )
            if name not in takes and name in self.all_settings():
                raise ConfigError(
                    f'{table}.{name} is given, but {self.key} "{kind}" takes '
                    f"{', '.join(takes) or 'no settings'} only; leave it out, or give another "
                    f"{self.key}"
                )
            check_known(f"{table}.{name}", {f"{table}.{its}": None for its in (*takes, *beside)})
        for name in takes:
            if self.default(kind, name) is inspect.Parameter.empty and name not in given:
                raise missing_setting(f"{table}.{name}")
        return {
            name: checked_setting(f"{table}.{name}", value, takes[name])
            for name, value in given.items()
        }


def hints_of(made_by: Made) -> dict[str, Any]:
    """List the arguments of a class or function, and what each is annotated with."""
    takes = made_by.__init__ if inspect.isclass(made_by) else made_by
    hints = get_type_hints(takes, include_extras=True)
    return {name: hints.get(name, object) for name in inspect.signature(made_by).parameters}


def check_args(table: str, made_by: Made, args: Mapping[str, object]) -> None:
    """Refuse arguments that a class or function of the user's does not take.

    Raises:
        ConfigError: Guesses which was meant.
    """
    try:
        takes = inspect.signature(made_by).parameters.values()
    except ValueError:  # of a function in C that does not say
        return
    if not any(its.kind is inspect.Parameter.VAR_KEYWORD for its in takes):
        for name in args:
            check_known(f"{table}.args.{name}", {f"{table}.args.{its.name}": None for its in takes})
