"""The log of API keys: decision rows of their creation and revocation, and when each was last used.

    <tenant>/ledger/...                       rows of kind `apikey`, with the action `create` or `revoke`
    <tenant>/apikeys/<key_id>/used/<period>   the key was used in this period of ten minutes; the newest counts

Rows are written directly into the ledger, since a key may be created before there is a fence store. They are made from
the stored key, so writing a row again writes the same one. A use is one create-only object per key and period,
whichever server writes it; older ones are deleted then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal

from cachetools import LRUCache

from ragfence.core.decision_rows import Row, context_of
from ragfence.core.hashing import digest
from ragfence.core.layout import FINGERPRINT_BYTES, SEAL_POSITION, TOKEN_BYTES, RowKind
from ragfence.core.operations import Operation, encoded
from ragfence.errors import RagfenceError
from ragfence.stores.objects import ObjectStore

KIND: Final = "apikey"
FOLDER: Final = "apikeys"
USED: Final = "used"
PERIOD_S: Final = 600
"""Uses are written once in this time, which is the precision of the last use."""
MAX_KEYS: Final = 10_000

_log = logging.getLogger("ragfence.server")


def record_event(
    objects: ObjectStore, tenant: str, key_id: str, action: Literal["create", "revoke"], *, at_ms: int, by: str = ""
) -> None:
    """Writes the decision row of a key that was created or revoked. It contains neither a secret nor its digest."""
    from ragfence.audit.columns import to_table
    from ragfence.audit.ledger import DRAINED, Ledger, split_by_day

    operation = Operation(kind=KIND, source_id=key_id, action=action, tenant=tenant)
    made = digest("ragfence/apikey-row/1", tenant.encode(), key_id.encode(), action.encode())
    token = made[:TOKEN_BYTES]
    row = Row(
        token=token,
        position=SEAL_POSITION,
        ts_ms=at_ms,
        kind=RowKind.NEW,
        key=operation.key,
        fingerprint=made[-FINGERPRINT_BYTES:],
        attempt=1,
        first_seen_ms=at_ms,
        sealed_at_ms=at_ms,
        winner=token,
        effect_id=key_id,
        context=context_of(operation, owner=by),
    )
    ledger = Ledger(tenant, objects)
    for day, table in split_by_day(to_table([row], tenant)):
        ledger.write(day, table, DRAINED)


class LastUse:
    """Writes that a key was used, at most once per period for each key and process."""

    def __init__(
        self, objects: ObjectStore, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.time
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._lock = threading.Lock()
        self._written: LRUCache[tuple[str, str], int] = LRUCache(max_keys)

    def is_due(self, tenant: str, key_id: str) -> bool:
        """Returns True once per period: then call `write`. Does no I/O."""
        if not key_id:
            return False
        period, place = int(self._clock()) // PERIOD_S, (tenant, key_id)
        with self._lock:
            if self._written.get(place, -1) >= period:
                return False
            self._written[place] = period
        return True

    def write(self, tenant: str, key_id: str) -> None:
        """Writes the use. Does not raise: if it cannot be written, that is done in the next period."""
        now = self._clock()
        folder = f"{encoded(tenant)}/{FOLDER}/{key_id}/{USED}/"
        name = f"{folder}{int(now) // PERIOD_S:020d}"
        try:
            if self._objects.put_new(name, str(round(now * 1000)).encode()).won:
                self._objects.delete([entry.name for entry in self._objects.list(folder) if entry.name < name])
        except RagfenceError as error:
            _log.warning("the last use of API key %s could not be written: %s", key_id, error)


def last_uses(names: Iterable[str], root: str) -> dict[str, int]:
    """Returns by key id when the newest period of use began, in milliseconds, from the names below `root`."""
    found: dict[str, int] = {}
    for name in names:
        key_id, _, rest = name[len(root) :].partition("/")
        folder, _, period = rest.partition("/")
        if folder == USED and period.isdigit():
            found[key_id] = max(found.get(key_id, 0), int(period) * PERIOD_S * 1000)
    return found
