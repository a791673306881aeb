"""The command `heedful index`: make and change an index of documents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.options import AsJson, Device
from heedful.cli.output import note, print_json
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.search.index import AddedDocuments, SearchIndex
    from heedful.search.mining import MiningCounts


def index(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DOCUMENTS",
            help="Files and folders: a document in each .txt or .md file, and in each row of .jsonl, .csv or .parquet "
            "(columns id, text, title).",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the index; documents are added to one that exists.")
    ] = Path("index"),
    model: Annotated[
        str | None, typer.Option(help="Model of sentence embeddings: a run, a folder, or NAME[@REVISION] on the hub.")
    ] = None,
    vectors: Annotated[str | None, typer.Option(help="Format of the vectors: float32, int8 or binary.")] = None,
    language: Annotated[
        str | None, typer.Option(help="Language of the words, for stemming and stop words; none: neither.")
    ] = None,
    passage_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of a passage of a long document; by default up to 256.")
    ] = None,
    delete: Annotated[list[str] | None, typer.Option(metavar="ID", help="Delete this document; repeatable.")] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the index to reclaim the space of deleted documents.")
    ] = False,
    mine_negatives: Annotated[
        Path | None,
        typer.Option(
            metavar="PAIRS",
            help="Find hard negatives for these pairs of a query and a relevant text, and write a file that finetune "
            "embed and finetune rank read.",
        ),
    ] = None,
    negatives_file: Annotated[
        Path | None,
        typer.Option(
            help="With --mine-negatives: the file to write; by default the name of PAIRS with -negatives.jsonl."
        ),
    ] = None,
    num_negatives: Annotated[
        int | None, typer.Option(help="With --mine-negatives: maximum negatives of a pair (5).")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="With --mine-negatives: minimum relative gap between the positive's score and a negative's (0.05)."
        ),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="With --mine-negatives: a cross-encoder whose scores are written too.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Index documents, to search them by words and by meaning.

    The same command again adds new documents and replaces changed ones; an interrupted one is resumed. Settings are
    those of the first command.
    """
    from heedful.bundled import BUNDLED_ENCODER
    from heedful.data.labelled.data_file import stem_and_suffix
    from heedful.search.index import SearchIndex
    from heedful.search.store import is_index
    from heedful.search.vectors import check_vector_format

    mining_options = {
        "negatives-file": negatives_file,
        "num-negatives": num_negatives,
        "margin": margin,
        "teacher": teacher,
    }
    if mine_negatives is None and (unused := [name for name, value in mining_options.items() if value is not None]):
        raise HeedfulError(f"--{unused[0]} is for --mine-negatives: give that too, or leave --{unused[0]} out")
    if not documents and not delete and not rebuild and mine_negatives is None:
        raise HeedfulError("no documents are given: name files or folders of texts")
    if is_index(out):
        search_index = SearchIndex(out, device=device)
        _check_unchanged(search_index, model=model, vectors=vectors, language=language, passage_tokens=passage_tokens)
    elif not documents:
        raise HeedfulError(f"{out} holds no index: name files or folders of texts to make one")
    else:
        from heedful.data.retrieval.documents import document_files

        document_files(documents)  # raises an error now if files are missing, before the model is loaded
        search_index = SearchIndex.create(
            out,
            model=model or BUNDLED_ENCODER,
            vectors=check_vector_format(vectors or "int8"),
            language=language or "english",
            passage_tokens=passage_tokens,
            device=device,
        )
    counts = _change_documents(search_index, documents or [], delete or [], rebuild, quiet=as_json)
    facts: dict[str, object] = {"documents": len(search_index), "passages": search_index.passages, "output": str(out)}
    if not as_json:
        if counts:
            print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
        print(f"{out}: {len(search_index):,} documents, {search_index.passages:,} passages")
    if mine_negatives is not None:
        file = negatives_file or Path(f"{stem_and_suffix(mine_negatives)[0]}-negatives.jsonl")
        limits = {"num_negatives": num_negatives, "margin": margin}
        set_limits = {name: value for name, value in limits.items() if value is not None}
        mining = _mine(search_index, mine_negatives, file, set_limits, teacher, device)
        facts |= {"negatives_file": str(file), **asdict(mining)}
        if not as_json:
            with_negatives = mining.pairs - mining.without
            print(f"{file}: {mining.negatives:,} negatives for {with_negatives:,} of {mining.pairs:,} pairs")
            note(f"Next:\n  heedful finetune rank {quote(str(file))}\n  heedful finetune embed {quote(str(file))}")
    elif not as_json:
        note(f'Next:\n  heedful search {quote(str(out))} "YOUR QUERY"')
    if as_json:
        print_json(counts | facts)


def _mine(
    search_index: SearchIndex, pairs: Path, file: Path, limits: dict[str, Any], teacher: str | None, device: str
) -> MiningCounts:
    """Mine negatives and write them to a file.

    Args:
        search_index: The index.
        pairs: File of pairs of a query and a relevant text.
        file: File to write.
        limits: The arguments num_negatives and margin of `mine_negatives` that the user has set.
        teacher: A cross-encoder whose scores are written too, if any.
        device: Device of the teacher.
    """
    from heedful.data import DataSettings, PairExample, read
    from heedful.infer.engine import Engine
    from heedful.search.mining import mine_negatives, write_negatives

    dataset = read(pairs, PairExample, DataSettings(dev_fraction=0.0))
    examples = [example for split in dataset.splits for example in dataset.examples(split)]
    for sentence in dataset.stated:
        note(sentence)
    teacher_engine = Engine(teacher, device=device) if teacher else None
    return write_negatives(file, mine_negatives(search_index, examples, teacher=teacher_engine, **limits))


def _check_unchanged(search_index: SearchIndex, **values: object) -> None:
    """Raise a HeedfulError if a setting differs from that of the index. None is a setting that was not given."""
    for name, value in values.items():
        current = getattr(search_index.settings, name)
        if value is None or value == current or (name == "model" and _is_same_model(str(value), current)):
            continue
        raise HeedfulError(
            f"--{name.replace('_', '-')} is {value}, but {search_index.folder} was made with {current}: leave it out, "
            "or make an index in another folder"
        )


def _is_same_model(model: str, current: str) -> bool:
    """Return whether the value of --model is the name or the path of the index's model."""
    return model == Path(current).name or Path(model).absolute() == Path(current)


def _change_documents(
    search_index: SearchIndex, documents: list[Path], delete: list[str], rebuild: bool, *, quiet: bool
) -> dict[str, int]:
    """Add and delete documents, rebuild the index, and return the counts of added, replaced, ... documents."""
    from heedful.data.retrieval.documents import read_documents

    def show(added: AddedDocuments) -> None:
        if not quiet:
            note(f"{added.added + added.replaced + added.unchanged:,} documents")

    counts = {}
    if documents:
        added = search_index.add(read_documents(documents), on_progress=show)
        counts = {"added": added.added, "replaced": added.replaced, "unchanged": added.unchanged}
    if delete:
        counts["deleted"] = search_index.delete(delete)
    if rebuild:
        search_index.rebuild()
    return counts
