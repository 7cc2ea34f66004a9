"""Intents: the work that a batch owes a sink, written down before any of it is done.

    <tenant>/sinks/<sink>/<epoch>/<batch>   deleted when all work of the batch is done: upserts, commit, seal, deletes

An intent holds only ids: no text, no metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ragfence.core.operations import encoded
from ragfence.documents.log import Address
from ragfence.errors import CommitUncertain, FormatCorrupt, FormatTooNew
from ragfence.stores.objects import ObjectStore

VERSION = 1

TouchedSnippets = Mapping[str, frozenset[str]]
"""doc_id -> the snippet_ids that a batch may have put into the sink or taken out of it"""


class OwedWork(NamedTuple):
    """The snippet_ids that the move of one document owes the sink."""

    upserts: Sequence[str]
    deletes: Sequence[str]


Intent = Mapping[str, OwedWork]
"""by doc_id"""


def touched_snippets(intent: Intent) -> dict[str, frozenset[str]]:
    return {doc_id: frozenset((*owed.upserts, *owed.deletes)) for doc_id, owed in intent.items()}


class Intents:
    """The intents of one sink."""

    def __init__(self, tenant: str, sink: str, objects: ObjectStore) -> None:
        self.root = f"{encoded(tenant)}/sinks/{encoded(sink)}"
        self._objects = objects

    def name_at(self, address: Address) -> str:
        return f"{self.root}/{address.text}"

    def put(self, name: str, intent: Intent) -> None:
        if not self._put(name, intent):
            raise CommitUncertain(f"the intent {name} was written by another process", hint="try again")

    def keep(self, name: str, intent: Intent) -> None:
        """Keeps the intent, or writes it again."""
        self._put(name, intent)

    def _put(self, name: str, intent: Intent) -> bool:
        documents = {doc_id: {"upsert": owed.upserts, "delete": owed.deletes} for doc_id, owed in intent.items()}
        data = json.dumps({"version": VERSION, "documents": documents}, separators=(",", ":")).encode()
        return self._objects.put_new(name, data).won

    def names(self) -> Iterator[str]:
        return (entry.name for entry in self._objects.list(f"{self.root}/"))

    def get(self, name: str) -> Intent | None:
        """Reads an intent; None if another process has settled it."""
        data = self._objects.get(name)
        if data is None:
            return None
        try:
            values = json.loads(data)
            if values["version"] > VERSION:
                raise FormatTooNew(f"{name} has format {values['version']}; this ragfence knows {VERSION}")
            return {doc_id: OwedWork(owed["upsert"], owed["delete"]) for doc_id, owed in values["documents"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as broken:
            raise FormatCorrupt(f"{name} is not a valid intent of a sink: {broken!r}") from broken

    def delete(self, name: str) -> None:
        self._objects.delete([name])
