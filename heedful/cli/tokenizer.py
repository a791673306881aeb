"""The command `heedful tokenizer`: train a tokenizer on text files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.options import AsJson, Overwrite, check_free
from heedful.cli.output import escape, print_json, print_table
from heedful.cli.settings_command import context_assignments
from heedful.errors import TokenizerError


def tokenizer(
    context: typer.Context,
    corpus: Annotated[list[Path], typer.Argument(help="UTF-8 text files, one text per line (.gz, .xz, .bz2 too).")],
    out: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    settings: Annotated[Path | None, typer.Option(help="Settings as a .toml or .json file.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer on text files.

    Trains WordPiece; with --algorithm bpe byte-level BPE, with --algorithm unigram Unigram.
    """
    from heedful.runs.overrides import override
    from heedful.settings import from_file
    from heedful.tokenizer import TokenizerSettings

    base = from_file(TokenizerSettings, settings) if settings else TokenizerSettings()
    resolved = override(base, context_assignments(context))
    check_free(out, overwrite)

    from heedful.tokenizer.training import read_lines, train_tokenizer

    trained = train_tokenizer(corpus, resolved)
    try:
        trained.save(out)
    except OSError as error:
        raise TokenizerError(f"{out} cannot be written: {error.strerror}") from error
    text = next((line for line in read_lines(corpus) if line.strip()), "")[:200]
    tokens = [trained.name(id) for id in trained.encode(text).ids]
    facts: dict[str, object] = {"vocab_size": trained.size, "fingerprint": trained.fingerprint, "folder": str(out)}
    if as_json:
        return print_json(facts | {"example": {"text": text, "tokens": tokens}})
    print_table([[name, str(value)] for name, value in facts.items()])
    print(f"\n{escape(text)}\n{' '.join(map(escape, tokens))}")
