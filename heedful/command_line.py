"""Commands for users to copy into a shell, in messages and reports."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote


def command_line(command: str, arguments: Sequence[str], options: Sequence[tuple[str, str]] = ()) -> str:
    """Return a command with quoted arguments, after "--" if one of them begins with "-" as options do.

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
    has_dash = any(argument.startswith("-") for argument in arguments)
    ordered = [*named, "--", *positional] if has_dash else [*positional, *named]
    return " ".join([command, *ordered])
