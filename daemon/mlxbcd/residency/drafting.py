"""Owns which model drafts for which: the setting's entry for a model, and whether both speak the same tokens."""

from __future__ import annotations

from collections.abc import Mapping

from mlxbcd.errors import ServeError
from mlxbcd.residency.names import Resolved, resolve
from mlxbcd.residency.store import check_files
from mlxbcd.residency.words import Words
from mlxbcd.text.tokenizer import Tokenizer


def chosen(source: Resolved, drafts: Mapping[str, str], aliases: Mapping[str, str]) -> Resolved | None:
    """The model that is to draft for `source`.

    Raises:
        ServeError: unknown_model; load_failed for files that can't be loaded. Both name the setting, since nobody who
            asks for `source` need know of it.
    """
    for name, draft in drafts.items():
        try:
            meant = resolve(name, aliases)
        except ServeError:
            # What isn't here any more needs no drafts.
            continue
        if meant.path == source.path:
            try:
                found = resolve(draft, aliases)
                check_files(found.path)
            except ServeError as error:
                setting = f"the setting drafts has {draft!r} draft for {source.name}"
                said = f"{setting}, but {error.message}; or take the entry out"
                raise ServeError(error.code, said, **error.data) from None
            return found
    return None


def words(source: Resolved, draft: Resolved | None) -> Words:
    """The words of a model, which have to be those of its draft model too.

    Raises:
        ServeError: load_failed.
    """
    own = Words.load(source.path)
    if draft is not None and Tokenizer.load(draft.path).vocabulary != own.tokenizer.vocabulary:
        raise ServeError(
            "load_failed",
            f"{draft.name} can't draft for {source.name}: their tokenizers differ; take the entry out of the setting "
            f"drafts, or name a smaller model of the same family there",
        )
    return own
