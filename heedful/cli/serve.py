"""The command `heedful serve`: serve models over HTTP."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from stat import S_IMODE
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.output import note
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.serve.settings import ServeSettings


def serve(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="A run, a model folder, an index, or NAME[@REVISION] on the hub; as NAME=RUN."
        ),
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1: this machine only.")] = "127.0.0.1",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one per line; each request must have one of them.")
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="All clients come through a proxy: do not limit connections per address."),
    ] = False,
    settings: Annotated[Path | None, typer.Option(help="Settings as a .toml or .json file.")] = None,
) -> None:
    """Serve models over HTTP.

    Embeddings, classes, tags, answers, masked tokens, generated texts and attention, with dynamic batching and
    deadlines; / is a page to try it. Ctrl-C or SIGTERM answers open requests and stops; SIGHUP reloads the models.
    """
    from heedful.runs.overrides import override
    from heedful.serve.settings import LOOPBACK, ServeSettings, name_models
    from heedful.settings import from_file

    base = from_file(ServeSettings, settings) if settings else ServeSettings()
    resolved = override(base, context_assignments(context))
    if behind_proxy:
        resolved = replace(resolved, behind_proxy=True)
    if host not in LOOPBACK and api_key_file is None and not resolved.allow_unauthenticated:
        raise HeedfulError(
            f"--host {host} opens the server to other machines without API keys: give --api-key-file FILE, or "
            "--allow-unauthenticated=true if a gateway authenticates requests"
        )
    keys = _read_api_keys(api_key_file)
    hosts = _allowed_hosts(host, resolved)
    named_runs = name_models(runs)
    from heedful.serve.memory import limit_arenas
    from heedful.serve.supervisor import listen, supervise

    sockets = listen(host, port)
    connection = supervise(sockets, note) if resolved.restart_on_crash else None  # returns in the server process only
    limit_arenas()
    from heedful.serve.run import run

    run(
        named_runs,
        resolved,
        sockets=sockets,
        keys=keys,
        hosts=hosts,
        log=note,
        supervisor_connection=connection,
    )


def _read_api_keys(file: Path | None) -> tuple[bytes, ...]:
    """Return the API keys in a file, or () for None. Print a warning if other users can read the file.

    Raises:
        HeedfulError: If packages for serving are not installed, or the file cannot be used.
    """
    try:
        from heedful.serve.middleware import read_api_keys
    except ModuleNotFoundError as error:
        raise HeedfulError(f"{error.name} is not installed: pip install 'heedful[serve]'") from None
    if file is None:
        return ()
    keys = read_api_keys(file)
    if os.name == "posix" and (mode := S_IMODE(file.stat().st_mode)) & 0o077:
        note(
            f"warning: {file} holds API keys, but its mode {mode:04o} lets other users read it: "
            f"chmod 600 {quote(str(file))}"
        )
    return keys


def _allowed_hosts(host: str, settings: ServeSettings) -> tuple[str, ...] | None:
    """Return the allowed values of the Host header, or None if any value is allowed.

    If the server listens on another address than the loopback, requests are authenticated. Any value is allowed then,
    unless `allowed_hosts` is set.
    """
    from heedful.serve.settings import LOOPBACK

    if host in LOOPBACK or settings.allowed_hosts:
        return (*LOOPBACK, host, *(name.lower() for name in settings.allowed_hosts))
    return None
