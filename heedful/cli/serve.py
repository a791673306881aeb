"""The verb that serves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from stat import S_IMODE
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.commands import context_assignments
from heedful.cli.output import note
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.serve.settings import ServeSettings


def serve(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub; as NAME=RUN."),
    ],
    port: Annotated[int, typer.Option(help="Where it listens; 0: any free port.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="127.0.0.1: this machine only.")] = "127.0.0.1",
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one on each line, of which each request needs one.")
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="All clients come through a proxy: do not limit connections per address."),
    ] = False,
    settings: Annotated[Path | None, typer.Option(help="Settings as a .toml or .json file.")] = None,
) -> None:
    """Serve models over HTTP.

    Embeddings, classes, tags, answers, masks, texts and attention, in batches, with deadlines; a page to try it at /.
    Ctrl-C or SIGTERM answers what is there and ends; SIGHUP reads the models anew.
    """
    from heedful.runs.overrides import override
    from heedful.serve.settings import LOOPBACK, ServeSettings, named
    from heedful.settings import from_file

    chosen = override(from_file(ServeSettings, settings) if settings else ServeSettings(), context_assignments(context))
    chosen = replace(chosen, behind_proxy=True) if behind_proxy else chosen
    if host not in LOOPBACK and api_key_file is None and not chosen.allow_unauthenticated:
        raise HeedfulError(
            f"--host {host} opens the server to other machines without API keys: give --api-key-file FILE, or "
            "--allow_unauthenticated=true if a gateway authenticates requests"
        )
    keys, hosts, named_runs = _keys(api_key_file), _hosts(host, chosen), named(runs)
    from heedful.serve.memory import spare
    from heedful.serve.supervisor import keep, listen

    sockets = listen(host, port)
    line = keep(sockets, note) if chosen.restart_on_crash else None  # from here on this is the server's process
    spare()
    from heedful.serve.run import run

    run(named_runs, chosen, sockets=sockets, keys=keys, hosts=hosts, log=note, line=line)


def _keys(file: Path | None) -> tuple[bytes, ...]:
    try:
        from heedful.serve.middleware import read_keys
    except ModuleNotFoundError as error:
        raise HeedfulError(f"{error.name} is not installed: pip install 'heedful[serve]'") from None
    if file is None:
        return ()
    keys = read_keys(file)
    if os.name == "posix" and (mode := S_IMODE(file.stat().st_mode)) & 0o077:
        note(f"warning: {file} holds API keys, and its mode {mode:04o} lets others in: chmod 600 {quote(str(file))}")
    return keys


def _hosts(host: str, settings: ServeSettings) -> tuple[str, ...] | None:
    """By which names it may be called; None: any, since whoever asks needs a key or is checked before."""
    from heedful.serve.settings import LOOPBACK

    if host in LOOPBACK or settings.allowed_hosts:
        return (*LOOPBACK, host, *(name.lower() for name in settings.allowed_hosts))
    return None
