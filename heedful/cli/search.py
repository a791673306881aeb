"""The command `heedful search`: find documents of an index."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, cast

import typer

from heedful.cli.options import AsJson, Device
from heedful.cli.output import MAX_WIDTH, escape, print_json

MAX_PASSAGE_CHARS = 300  # longer passages are cut


def search(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="The folder of an index, from heedful index.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text to search for.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", help="Most documents to print.", min=1)] = 5,
    method: Annotated[
        str, typer.Option(help="words (BM25), vectors (cosines), or hybrid, which fuses both rankings.")
    ] = "hybrid",
    rerank: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Rank the best 50 documents again by a model that scores pairs of texts."),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Search an index, and print the best passage of each document."""
    from heedful.search.index import SearchIndex, SearchMethod

    hits = SearchIndex(folder, device=device).search(query, top_k, method=cast(SearchMethod, method), reranker=rerank)
    if as_json:
        return print_json([hit.to_dict() for hit in hits])
    for rank, hit in enumerate(hits, start=1):
        print(f"{rank}. {escape(hit.id)}  {escape(hit.title)}".rstrip() + f"  ({hit.score:.4f})")
        passage = textwrap.shorten(hit.passage, MAX_PASSAGE_CHARS, placeholder=" …")
        print(textwrap.fill(escape(passage), MAX_WIDTH, initial_indent="   ", subsequent_indent="   "))
    if not hits:
        print("no document has a word of the query" if method == "words" else "the index has no documents")
