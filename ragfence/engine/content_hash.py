"""The hash algorithm of a tenant's contents, and its key: fixed with the first content.

    <tenant>/documents/settings   {"version": 1, "content_hash": "xxh3" or "sha256"}
                                  {"version": 2, "content_hash": "hmac", "secret_check": 64 hex digits}
    <tenant>/documents/hashes/<n> {"version": 3, "known": [...], "written": [...], "after_epoch": N}

The secret of a tenant with `hmac` is passed in and never stored. Its check is a digest that only this secret produces,
so that another secret is refused before anything is written with it.

A tenant changes between xxh3 and sha256 by numbered entries, of which the highest counts. `known` lists the algorithms
that live documents may be known by: a process that lacks one of them would ingest documents again, so it is refused.
`written` lists those that documents may be written with, in epochs above `after_epoch`:

    1  known both, written the old one     announced: processes that do not know both are refused
    2  known both, written both            in epochs that began after 1 was durable
    3  known both, written the new one     closing: no document is written with the old one in a later epoch
    4  known the new one, written the new one

A process reads the entries once per epoch. Since an algorithm is written only in epochs that began after its entry was
durable, every process that commits in such an epoch has read it: no commit has to read the object store for this.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable
from typing import NamedTuple

from ragfence.core.hashing import Algorithm, ContentKey
from ragfence.core.operations import encoded
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import Hydrator
from ragfence.errors import (
    ContentSecretError,
    FormatCorrupt,
    FormatTooNew,
    NotReady,
    ObjectsRequired,
    PolicyError,
    TransientError,
)
from ragfence.stores.objects import ObjectStore

VERSION = 2
HASHES_VERSION = 3
EPOCH_WAIT_S = 60.0

Secret = Callable[[], bytes]
"""Returns the secret of a tenant, from outside the stores. Raises `ContentSecretError`."""


class KnownHashes(NamedTuple):
    """The algorithms of a tenant, as they are stored."""

    known: tuple[Algorithm, ...]
    """of live documents"""
    written: tuple[Algorithm, ...]
    after_epoch: int = 0
    number: int = 0


class ContentHash:
    """The algorithm that a tenant's contents are hashed with, and its key if it takes one.

    Another algorithm would make all known documents new, so it is fixed with the first document, and not before: reads
    and dry runs leave the choice open. `hmac` is fixed with the first operation of any kind, because the payloads of
    all operations are compared by keyed digests.
    """

    def __init__(
        self,
        tenant: str,
        objects: ObjectStore | None,
        wanted: Algorithm,
        secret: Secret | None = None,
        *,
        also: Algorithm | None = None,
    ) -> None:
        self._tenant = tenant
        self._objects = objects
        self.algorithm = wanted
        self.also = also
        """the second algorithm that documents are recognised by"""
        self._first = wanted
        self._secret = secret
        self._name = f"{encoded(tenant)}/documents/settings"
        self._entries = f"{encoded(tenant)}/documents/hashes/"
        self._is_fixed = False
        self._settled_epoch = 0
        self._is_begun = False
        self._key: ContentKey | None = None

    def key(self) -> ContentKey | None:
        """Returns the key; None if digests are not keyed. The first call fixes the secret, or raises like `check`."""
        if self.algorithm != "hmac" or self._is_fixed:
            return self._key
        self.check()
        if not self._is_fixed:
            self._refuse_used_tenant()
            self.settle()
        return self._key

    def check(self) -> None:
        """Raises `PolicyError` if documents are known by another algorithm than those of the policy."""
        known = self._store.get(self._name)
        if known is not None:
            self._compare(known)

    def first(self) -> Algorithm:
        """Returns the algorithm of the tenant's first document, which retractions keep; before it, the policy's."""
        if not self._is_fixed:
            self.check()
        return self._first

    def check_keyed(self) -> None:
        """Checks, when a fence is opened, only whether digests are keyed.

        Operations without documents do not depend on the algorithm, but must not store plain digests where keyed ones
        are promised. If the store is down now, the next call that needs it fails.
        """
        if self.algorithm == "hmac" or self._objects is None:
            return
        try:
            known = self._objects.get(self._name)
            if known is not None and self._parsed(known)["content_hash"] == "hmac":
                self._compare(known)
        except (TransientError, FormatCorrupt):
            return

    def settle(self) -> None:
        """Fixes the algorithm, or raises like `check`. Called before each commit; only the first reads the store."""
        if self._is_fixed:
            return
        values: dict[str, object] = {"version": 1, "content_hash": self.algorithm}
        if self.algorithm == "hmac":
            values |= {"version": 2, "secret_check": self._derived().digest("ragfence/content-secret/1").hex()}
        data = json.dumps(values).encode()
        put = self._store.put_new(self._name, data)
        self._compare(data if put.won else put.existing or b"")

    def settle_in(self, epoch: int, epochs: Epochs, hydrator: Hydrator) -> None:
        """Does the same before a commit of documents in this epoch; the store is read once per epoch.

        If the tenant changes to the algorithm of the policy with this commit, a new epoch begins: the commit is then
        void, and the writer repeats it in the new one.
        """
        if epoch == self._settled_epoch:
            return
        self.settle()
        if self.algorithm != "hmac":
            hashes = self._opened(epochs)
            if epoch <= hashes.after_epoch:
                self._begin_epoch_above(hashes.after_epoch, epochs, hydrator)
                return
        self._settled_epoch = epoch

    def begin(self, epochs: Epochs, hydrator: Hydrator) -> None:
        """Begins the change to the algorithm of the policy, before documents are claimed that will be written with it.

        `settle_in` would do it as well, but then the first batch would be chunked for nothing.
        """
        if self.also is not None and not self._is_begun:
            self._begin_epoch_above(self._opened(epochs).after_epoch, epochs, hydrator)
            self._is_begun = True

    def hashes(self) -> KnownHashes:
        """Returns the algorithms of the tenant, as they are stored; those of the policy before the first document."""
        entries = list(self._store.list(self._entries))
        if entries:
            name = max(entry.name for entry in entries)
            return self._entry_in(name, self._store.get(name) or b"")
        if not self._is_fixed and (known := self._store.get(self._name)) is not None:
            self._first = self._algorithm_in(known)
        return KnownHashes((self._first,), (self._first,))

    def close(self, epochs: Epochs, hydrator: Hydrator) -> KnownHashes:
        """Stops all writes with the old algorithm. Returns when no process can commit one any more."""
        hashes = self._opened(epochs)
        if hashes.written != (self.algorithm,):
            known = (*(each for each in hashes.known if each != self.algorithm), self.algorithm)
            hashes = self._checked(self._put(hashes, known, (self.algorithm,), hashes.after_epoch))
        if len(hashes.known) > 1:
            self._begin_epoch_above(epochs.known().newest_begun, epochs, hydrator)
        return hashes

    def finish(self, closed: KnownHashes) -> None:
        """States that every live document is known by the algorithm of the policy, which was so after `close`."""
        if closed.known == (self.algorithm,):
            return
        mine = (self.algorithm,)
        if self._put(closed, mine, mine, closed.after_epoch).known != mine:
            raise PolicyError(
                f"another process has changed the content hash of tenant {self._tenant!r} meanwhile",
                hint="try again once every process has the same content_hash",
            )

    def _opened(self, epochs: Epochs) -> KnownHashes:
        """Returns the algorithms of the tenant, once documents may be written with that of the policy."""
        hashes = self._checked(self.hashes())
        while self.algorithm not in hashes.written:
            hashes = self._checked(self._widened(hashes, epochs))
        return hashes

    def _widened(self, hashes: KnownHashes, epochs: Epochs) -> KnownHashes:
        """Takes the next step to writing with the algorithm of the policy."""
        if self.algorithm not in hashes.known:
            return self._put(hashes, (*hashes.known, self.algorithm), hashes.written, hashes.after_epoch)
        if len(hashes.written) == 1 and hashes.known[0] != hashes.written[0]:
            raise PolicyError(
                f"the documents of tenant {self._tenant!r} are no longer written with {self.algorithm}",
                hint=f"set content_hash: {hashes.written[0]} and content_hash_also: {self.algorithm}",
            )
        # Read after the entry that announces it was durable: whoever read none did so in this epoch or an earlier one.
        after = epochs.known().newest_begun
        return self._put(hashes, hashes.known, (*hashes.written, self.algorithm), after)

    def _put(
        self, before: KnownHashes, known: tuple[Algorithm, ...], written: tuple[Algorithm, ...], after_epoch: int
    ) -> KnownHashes:
        """Writes the next entry, and returns the one that counts: ours, or that of another process."""
        values = {"version": HASHES_VERSION, "known": known, "written": written, "after_epoch": after_epoch}
        name = f"{self._entries}{before.number + 1:06d}"
        data = json.dumps(values).encode()
        put = self._store.put_new(name, data)
        return self._entry_in(name, data if put.won else put.existing or b"")

    def _begin_epoch_above(self, epoch: int, epochs: Epochs, hydrator: Hydrator) -> None:
        give_up_at = time.monotonic() + EPOCH_WAIT_S
        while epoch and epochs.known().newest_complete <= epoch:
            if not hydrator.try_hydrate():
                if time.monotonic() >= give_up_at:
                    raise NotReady(
                        "the content hash changes in a new epoch, which did not begin in time", hint="try again"
                    )
                time.sleep(0.05)

    def _checked(self, hashes: KnownHashes) -> KnownHashes:
        """Raises `PolicyError` if the policy lacks an algorithm that live documents may be known by."""
        mine = (self.algorithm, self.also)
        if all(each in mine for each in hashes.known):
            return hashes
        if len(hashes.known) > 1:
            newest = next((each for each in reversed(hashes.known) if each in hashes.written), hashes.known[-1])
            older = next(each for each in hashes.known if each != newest)
            hint = f"set content_hash: {newest} and content_hash_also: {older}"
            if self.algorithm == newest:
                hint += "; it may be removed after `ragfence content-hash --finish`"
        else:
            hint = f"set content_hash: {hashes.known[0]}, or use another tenant"
            if self.algorithm != "hmac" and "hmac" not in hashes.known:
                hint += f"; to change it, keep both for a while: content_hash_also: {hashes.known[0]}"
        raise PolicyError(
            f"the documents of tenant {self._tenant!r} are hashed with {' and '.join(hashes.known)}, and the policy "
            f"says {' and '.join(each for each in mine if each)}",
            hint=hint,
        )

    def _entry_in(self, name: str, data: bytes) -> KnownHashes:
        try:
            values = json.loads(data)
            if values["version"] > HASHES_VERSION:
                raise FormatTooNew(f"{name} has format {values['version']}; this ragfence knows {HASHES_VERSION}")
            known, written = tuple(values["known"]), tuple(values["written"])
            if not known or not written or not {*known, *written} <= {"xxh3", "sha256"} or not {*written} <= {*known}:
                raise ValueError(f"known {known}, written {written}")
            return KnownHashes(known, written, int(values["after_epoch"]), int(name.rpartition("/")[2]))
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} does not hold the content hashes of a tenant: {broken!r}") from broken

    def _algorithm_in(self, known: bytes) -> Algorithm:
        fixed = self._parsed(known)["content_hash"]
        if fixed == "xxh3" or fixed == "sha256" or fixed == "hmac":  # narrows the type
            return fixed
        raise FormatCorrupt(f"{self._name} names an unknown content hash: {fixed!r}")

    @property
    def _store(self) -> ObjectStore:
        if self._objects is None:
            raise ObjectsRequired(
                f"content_hash: {self.algorithm} needs an object store, and this fence was opened without one"
            )
        return self._objects

    def _derived(self) -> ContentKey:
        if self._key is None:
            if self._secret is None:
                raise ContentSecretError(f"Tenant {self._tenant!r} has content_hash: hmac, and no secret was given")
            self._key = ContentKey(self._secret(), self._tenant)
        return self._key

    def _refuse_used_tenant(self) -> None:
        """Refuses a tenant with plain fingerprints: every retry of an earlier call would look like a conflict."""
        used = next(iter(self._store.list(f"{encoded(self._tenant)}/sealed/", limit=1)), None)
        if used is None:
            return
        self.check()  # another process may have fixed it a moment ago
        if not self._is_fixed:
            raise PolicyError(
                f"Tenant {self._tenant!r} was used before without content_hash: hmac, and the policy asks for it",
                hint="remove content_hash: hmac, or use another tenant: it is chosen before the first operation",
            )

    def _parsed(self, known: bytes) -> dict[str, object]:
        try:
            settings = json.loads(known)
            version = settings["version"]
            if version <= VERSION:
                settings["content_hash"]
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{self._name} does not hold valid settings: {broken!r}") from broken
        if version > VERSION:
            raise FormatTooNew(f"{self._name} has format {version}; this ragfence knows {VERSION}")
        assert isinstance(settings, dict)
        return settings

    def _compare(self, known: bytes) -> None:
        settings, wanted = self._parsed(known), self.algorithm
        self._first = fixed = self._algorithm_in(known)
        if "hmac" in (fixed, wanted):
            self._checked(KnownHashes((fixed,), (fixed,)))
        else:
            self._checked(self.hashes())
        if wanted == "hmac":
            mine = self._derived().digest("ragfence/content-secret/1").hex()
            if not hmac.compare_digest(mine, str(settings.get("secret_check", ""))):
                self._key = None
                raise ContentSecretError(
                    f"The secret of tenant {self._tenant!r} is not the one that its contents are hashed with",
                    hint="give the secret that the tenant was first used with (content_secret in the policy); "
                    "it cannot be changed, and without it use another tenant and ingest again",
                )
        self._is_fixed = True
