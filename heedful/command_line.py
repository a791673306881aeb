"""Commands for a person to copy into a shell."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote


def command_line(command: str, arguments: Sequence[str], options: Sequence[tuple[str, str]] = ()) -> str:
    """Return a command with quoted arguments; those that begin with "-" follow a "--", so none is taken for an option.

    Args:
        command: The program and its verb.
        arguments: Positional arguments, unquoted.
        options: Names and unquoted values of options.

    >>> command_line("heedful look", ["run", "two words"], [("--pair", "third")])
    "heedful look run 'two words' --pair third"
    >>> command_line("heedful look", ["run", "-5 degrees"], [("--pair", "third")])
    "heedful look --pair third -- run '-5 degrees'"
    """
    positional = [quote(argument) for argument in arguments]
    named = [f"{name} {quote(value)}" for name, value in options]
    ordered = [*named, "--", *positional] if any(each.startswith("-") for each in arguments) else [*positional, *named]
    return " ".join([command, *ordered])
