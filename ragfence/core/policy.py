"""The policy: what a user may tune, and what is refused because it would break a promise.

Every default is right as it stands; a `ragfence.yml` holds only what differs. `Policy.from_mapping` is the
way in: it answers all problems of a file at once, one line each, as one `PolicyError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator
from pydantic import ValidationError as PydanticValidationError

from ragfence.core.policy_section import HEADER_NAME, Names, PolicySection
from ragfence.core.redaction import DEFAULT_PATTERNS, METADATA_PATTERNS, Redaction
from ragfence.core.retention import WEBHOOK_HORIZONS_HOURS, RetentionClass, shortest_ttl, usual_class
from ragfence.core.webhook_policy import WEBHOOK_NAME, WebhookPolicy
from ragfence.errors import PolicyError

ROW_FIELDS: Final = frozenset(
    """
    row_id ts tenant kind decision phase flags idempotency_key payload_hash effect_id source_type source_id revision
    index_hash action event_id correlation_id attempt fence owner run_id route origin api_key winner first_seen
    sealed_at expires_at waited_ms error_code diff_size saved
    """.split()  # noqa: SIM905  # thirty lines of quotes say no more
)

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=365 * 24 * 3600)]


class TtlRules(PolicySection):
    """How long a sealed record answers, counted from its seal. `pending_days` is counted from the last attempt."""

    webhook_days: float = Field(default=14, gt=0, le=3650)
    """lifetime of operations of class `webhook`"""
    api_hours: float = Field(default=48, gt=0, le=87600)
    """lifetime of operations of class `api`"""
    batch_days: float = Field(default=3, gt=0, le=3650)
    """lifetime of operations of class `batch`"""
    queue_days: float = Field(default=14, gt=0, le=3650)
    """lifetime of operations of class `queue`"""
    outbox_days: float = Field(default=30, gt=0, le=3650)
    """lifetime of operations of class `outbox`"""
    step_days: float = Field(default=1, gt=0, le=3650)
    """lifetime of operations of class `step`"""
    pending_days: float = Field(default=7, gt=0, le=3650)
    """how long a record without an outcome is remembered, with its attempts and its last error"""

    def hours(self, retention: RetentionClass) -> float:
        if retention == "api":
            return self.api_hours
        days: float = getattr(self, f"{retention}_days")
        return 24 * days


class StoreRules(PolicySection):
    """Which fence store is required, and how long it answers."""

    fence: Literal["sqlite", "redis"] | None = None
    """the kind of fence store that is required; without it, any kind is accepted"""
    ttl: TtlRules = TtlRules()
    """lifetimes of records"""


class LoggingRules(PolicySection):
    """What a log line of a decision contains."""

    include_fields: Names = (
        "idempotency_key",
        "effect_id",
        "decision",
        "source_type",
        "source_id",
        "attempt",
        "winner",
        "event_id",
        "correlation_id",
        "route",
    )
    """columns of the decision row that are written to its log line"""

    @field_validator("include_fields")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in ROW_FIELDS:
                near = difflib.get_close_matches(name, ROW_FIELDS, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(ROW_FIELDS))}"
                raise PolicyError(f"{name!r} is not a field of a decision row; {advice}")
        return names


class OnConflict(PolicySection):
    """The answer to a known key with another payload."""

    status: Literal[409, 422] = 409
    """HTTP status of a conflict"""
    include_diff: bool = False
    """store redacted payloads, so that a conflict can show what differs (a server does so by default)"""
    max_diff_bytes: int = Field(default=16384, ge=0, le=1 << 20)
    """limit for the stored payload"""


class LeaseRules(PolicySection):
    """How long an owner keeps a key, and how often a key may be tried."""

    ttl_s: float = Field(default=30, ge=0.05, le=24 * 3600)
    """how long a dead owner blocks its key; a live owner renews its lease at a third of this time"""
    max_runtime_s: Seconds = 3600
    """after this time a lease is no longer renewed, so that a hung effect is freed"""
    max_attempts: int = Field(default=5, ge=1, le=10_000)
    """after this many attempts a key is quarantined"""
    seal_retry_s: float = Field(default=10, ge=0, le=3600)
    """how long a seal that could not be written is tried again"""


class WaitRules(PolicySection):
    """What a caller does while another owner holds the lease."""

    mode: Literal["wait", "raise"] = "wait"
    """`wait` for the receipt, or `raise` `InFlight` at once"""
    deadline_s: float = Field(default=60, ge=0, le=24 * 3600)
    """how long a caller waits before `InFlight` is raised"""


class DurabilityRules(PolicySection):
    """What a seal on Redis waits for, in addition to the primary's memory. Without it, the seal is tried again."""

    wait_replicas: int = Field(default=0, ge=0, le=64)
    """number of replicas that must have the seal (WAIT)"""
    wait_aof: bool = False
    """whether the seal must be on the disk of the primary and of `wait_replicas` replicas (WAITAOF)"""
    wait_timeout_ms: int = Field(default=1000, ge=1, le=600_000)
    """limit of each wait"""

    @property
    def confirms(self) -> bool:
        return self.wait_replicas > 0 or self.wait_aof


class ResultRules(PolicySection):
    """How large the result of an operation may be, and where it is stored."""

    inline_max_bytes: int = Field(default=1 << 18, ge=0, le=1 << 20)
    """a larger result is stored in the object store instead of the record"""
    max_bytes: int = Field(default=1 << 26, ge=0, le=1 << 30)
    """a larger result is refused with `ResultTooBig`"""


class DocumentRules(PolicySection):
    """Limits of documents, how they are chunked, and how long earlier revisions are kept."""

    max_text_bytes: int = Field(default=1 << 24, ge=1, le=1 << 30)
    """limit for the text of a document, in UTF-8"""
    max_metadata_bytes: int = Field(default=1 << 16, ge=2, le=1 << 24)
    """limit for the metadata of a document, as canonical JSON"""
    allow_empty_text: bool = False
    """accept documents whose text is empty or white space alone, which no search can find"""
    content_fields: Names = ()
    """metadata fields that count as content: a changed value makes a new revision, chunked and embedded again"""
    chunk_size: int = Field(default=1000, ge=1, le=1 << 20)
    """largest snippet of the default chunkers, in characters"""
    chunk_overlap: int = Field(default=0, ge=0, le=1 << 19)
    """characters that two neighbouring snippets share; below `chunk_size`"""
    keep_superseded_days: float = Field(default=30, ge=0, le=3650)
    """after this time `compact` drops superseded revisions, and their content is new again"""
    max_prune_share: float = Field(default=0.1, ge=0, le=1)
    """a sync that would retract a larger share of the live documents is refused (`PruneTooLarge`)"""

    @model_validator(mode="after")
    def _overlap_fits(self) -> DocumentRules:
        if self.chunk_overlap >= self.chunk_size:
            raise PolicyError(f"chunk_overlap must be below chunk_size ({self.chunk_size})")
        return self


class IndexRules(PolicySection):
    """How indexes are built and verified, which builds an alias accepts, and which builds are kept."""

    keep_targets: int = Field(default=3, ge=1, le=100)
    """number of earlier builds of every alias that gc keeps for a rollback, in addition to the live one"""
    max_shrinkage: float = Field(default=0.2, ge=0, le=1)
    """gate: the share of the live build's rows that the next build may lack"""
    min_coverage: float = Field(default=0.0, ge=0, le=1)
    """gate: the share of live documents that the build must contain; 0 turns the gate off"""
    min_overlap: float = Field(default=0.0, ge=0, le=1)
    """gate: the share of results that new and live build have in common; 0 checks it only with golden queries"""
    golden: str = ""
    """gate: path of a file of golden queries"""
    min_recall: float = Field(default=0.9, ge=0, le=1)
    """gate: the share of expected results that the golden queries must find together"""
    overlap_queries: int = Field(default=20, ge=1, le=1000)
    """number of rows of the new build whose texts the overlap gate searches for if there are no golden queries"""
    embed_workers: int = Field(default=2, ge=1, le=64)
    """number of segments that a build embeds at the same time"""
    max_self_recall_sample: int = Field(default=64, ge=0, le=10_000)
    """largest number of rows of a new exact index that are searched for before it is sealed"""
    min_self_recall: float = Field(default=0.99, ge=0, le=1)
    """the share of those rows that must find themselves"""
    ann_above: int = Field(default=100_000, ge=0, le=1 << 40)
    """an index with more rows is approximate, unless its spec names an index"""
    recall_sample: int = Field(default=128, ge=1, le=10_000)
    """number of searches of an approximate index that are compared with exact ones before it is sealed"""
    min_ann_recall: float = Field(default=0.9, ge=0, le=1)
    """gate: the share of an exact search's results that an approximate index must find; 0 turns the gate off"""


class Http(PolicySection):
    """Limits of the HTTP API, and its answers while another request with the same `Idempotency-Key` runs."""

    in_progress: Literal[202, 409] = 202
    """status for a request while another request with its key is running"""
    wait_s: float = Field(default=0, ge=0, le=3600)
    """how long such a request waits for the other one first"""
    max_body_bytes: int = Field(default=4 << 20, ge=0, le=1 << 30)
    """limit for the body of a request"""
    max_stored_bytes: int = Field(default=1 << 20, ge=0, le=1 << 30)
    """a longer response is sent once and not stored; a replay reports that it was too long"""
    max_batch_bytes: int = Field(default=1 << 26, ge=0, le=1 << 32)
    """limit for the body of a batch of documents, which is spooled to a file"""
    max_batch_lines: int = Field(default=10_000, ge=1, le=1_000_000)
    """limit for the number of documents in a batch"""
    quotas: Names = ()
    """limits of every tenant, such as `600/minute`; without any, no tenant is limited"""
    tenant_quotas: Annotated[dict[str, Names], Field(strict=False)] = Field(default={})
    """limits of single tenants, which replace `quotas`"""
    backends: Names = ("lance",)
    """backends that a build over HTTP may name; a URL chosen by a client would make the server write there"""
    embedders: Names = ("wordllama", "minilm")
    """embedders that a build over HTTP may name"""
    answer_within_s: float = Field(default=25, gt=0, le=3600)
    """a request without X-Request-Timeout is answered within this time, if need be with an address for its status"""
    tenant_share: float = Field(default=1, gt=0, le=64)
    """a tenant may use at most this multiple of the server's free capacity (requests, arriving bodies, their bytes)"""
    tenant_threads: int = Field(default=8, ge=1, le=64)
    """number of server threads that one tenant may use at the same time"""
    max_arriving: int = Field(default=1024, ge=1, le=100_000)
    """limit for requests of all tenants whose body is still arriving"""
    max_arriving_bytes: int = Field(default=1 << 28, ge=1, le=1 << 40)
    """limit for the bytes of those bodies together"""
    max_unfinished_bytes: int = Field(default=1 << 30, ge=1, le=1 << 40)
    """limit for the batches of all tenants that are arriving or being processed, in temporary files"""
    body_grace_s: float = Field(default=10, gt=0, le=3600)
    """how long a body may take, whatever its size, plus a random time of up to half of that; every `min_body_rate`
    bytes received add a second"""
    min_body_rate: int = Field(default=1 << 14, ge=1, le=1 << 30)
    """bytes a second that a body must reach after `body_grace_s`"""
    max_builds: int = Field(default=2, ge=1, le=64)
    """builds of one tenant at the same time in one process; more are answered with 429"""
    build_threads: int = Field(default=8, ge=1, le=64)
    """threads of one process for the builds of all tenants"""


class AuditRules(PolicySection):
    """The ledger: decision rows that were drained into Parquet objects, and how long they are kept."""

    keep_days: float = Field(default=400, gt=0, le=36500)
    """how long the ledger keeps a row"""
    drain_every_s: float = Field(default=60, ge=0, le=24 * 3600)
    """how often the API server drains; 0 turns it off, for example because a schedule drains"""
    drain_batch_rows: int = Field(default=50_000, ge=1, le=1_000_000)
    """largest number of rows in one object"""
    min_files: int = Field(default=16, ge=2, le=10_000)
    """from this number on, the small objects of a day are merged into one"""
    compact_below_bytes: int = Field(default=8 << 20, ge=1, le=1 << 30)
    """an object below this size is small"""


class OutboxRules(PolicySection):
    """The outbox: events in a table of the user's database, and the relay that sends them."""

    keep_days: float = Field(default=30, gt=0, le=3650)
    """how long an event is kept after it was sent"""
    max_attempts: int = Field(default=20, ge=1, le=10_000)
    """after this many failures an event is dead, and blocks its key until somebody decides"""
    lag_alert_s: Seconds = 300
    """`ragfence outbox status` fails, and a relay warns, if the oldest unsent event is older than this"""


class RedactionRules(PolicySection):
    """What is removed from payloads, metadata, messages and log lines before they are stored."""

    fields: Names = ()
    """names or paths of fields, in addition to the default fields, which always apply"""
    patterns: Names = DEFAULT_PATTERNS
    """names of built-in patterns, and `re:` followed by a regular expression (RE2)"""

    @field_validator("fields")
    @classmethod
    def _usable_fields(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        return Redaction(fields=fields, patterns=()).fields

    @field_validator("patterns")
    @classmethod
    def _usable_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return Redaction(patterns=patterns).patterns


class ContentSecret(PolicySection):
    """Where the secret of `content_hash: hmac` is found; never the secret itself."""

    env: str = ""
    """an environment variable; `RAGFENCE_CONTENT_SECRET` if neither variable nor file is given"""
    file: str = ""
    """path of a file; `{tenant}` in it stands for the name of the tenant"""

    @model_validator(mode="after")
    def _one_place(self) -> ContentSecret:
        if self.env and self.file:
            raise PolicyError("names a file and an environment variable; keep one of them")
        return self


class KindPolicy(PolicySection):
    """Settings that differ for one kind of operation."""

    retention: RetentionClass | None = Field(default=None, alias="class")
    """which lifetime of `stores.ttl` applies; by default it follows from the kind"""
    lease_ttl_s: float | None = Field(default=None, ge=0.05, le=24 * 3600)
    """instead of `lease.ttl_s`"""
    max_attempts: int | None = Field(default=None, ge=1, le=10_000)
    """instead of `lease.max_attempts`"""
    max_runtime_s: Seconds | None = None
    """instead of `lease.max_runtime_s`"""
    wait_s: float | None = Field(default=None, ge=0, le=24 * 3600)
    """instead of `wait.deadline_s`"""
    ttl_hours: float | None = Field(default=None, gt=0, le=87600)
    """lifetime of a sealed key, instead of the lifetime of its class"""


class ProviderPolicy(PolicySection):
    """A sender that repeats messages until they are acknowledged."""

    retention: RetentionClass = Field(default="webhook", alias="class")
    """the class whose lifetime must outlive the retries of this sender"""
    retry_horizon_hours: float = Field(ge=0, le=43800)
    """how long the sender repeats a message"""


@dataclass(frozen=True, slots=True)
class KindRules:
    """What the engine needs to know about one kind of operation; all durations in milliseconds."""

    retention_class: RetentionClass
    ttl_ms: int
    pending_ttl_ms: int
    lease_ms: int
    max_attempts: int
    max_runtime_ms: int
    wait_ms: int
    """0: answer immediately that another owner is at work"""
    source_ttl_ms: int = field(init=False, compare=False)
    """0: for ever"""

    def __post_init__(self) -> None:
        # A claim must not shorten the memory of the top sequence, nor a seal that of a pending lease.
        forever = self.ttl_ms == 0 or self.pending_ttl_ms == 0
        object.__setattr__(self, "source_ttl_ms", 0 if forever else max(self.ttl_ms, self.pending_ttl_ms))


class Policy(PolicySection):
    """Frozen; build it with `Policy()`, `Policy.from_mapping(...)` or `load_policy("ragfence.yml")`."""

    require_headers: Names = ("Idempotency-Key",)
    """headers that a request to a guarded route must have"""
    reject_on_body_mismatch: bool = True
    """always true: another payload under a known key is never applied"""
    stores: StoreRules = StoreRules()
    """fence store and lifetimes"""
    logging: LoggingRules = LoggingRules()
    """log lines"""
    on_conflict: OnConflict = OnConflict()
    """conflicts"""
    lease: LeaseRules = LeaseRules()
    """leases and attempts"""
    wait: WaitRules = WaitRules()
    """waiting for another owner"""
    on_store_error: Literal["closed", "open"] = "closed"
    """while the fence store is down: `closed` raises an error, `open` runs effects of `once` and journals them"""
    durability: DurabilityRules = DurabilityRules()
    """confirmation of seals by Redis"""
    results: ResultRules = ResultRules()
    """results of operations"""
    documents: DocumentRules = DocumentRules()
    """documents"""
    indexes: IndexRules = IndexRules()
    """indexes, gates and gc"""
    http: Http = Http()
    """HTTP API"""
    audit: AuditRules = AuditRules()
    """ledger of decisions"""
    outbox: OutboxRules = OutboxRules()
    """outbox and relay"""
    redaction: RedactionRules = RedactionRules()
    """removal of secrets"""
    content_hash: Literal["xxh3", "sha256", "hmac"] = "xxh3"
    """digest of document contents, fixed with the first document of a tenant (a server uses `sha256` by default)"""
    content_hash_also: Literal["xxh3", "sha256"] | None = None
    """second digest that documents are recognised by, while a tenant changes from one to the other"""
    content_secret: ContentSecret = ContentSecret()
    """the secret of `content_hash: hmac`"""
    kinds: dict[str, KindPolicy] = Field(default={})
    """settings of single kinds of operations, by kind"""
    providers: dict[str, ProviderPolicy] = Field(default={})
    """senders whose retries the lifetimes must outlive, by name"""
    webhooks: dict[str, WebhookPolicy] = Field(default={})
    """webhooks that `ragfence serve` receives, by name"""

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except PydanticValidationError as invalid:
            raise _refusal([_explained(error) for error in invalid.errors(include_url=False)]) from None
        if problems := list(_broken_promises(self)):
            raise _refusal(problems)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Policy:
        """The policy of a parsed file. All its problems are in one `PolicyError`."""
        if strange := {name for name in given if type(name) is not str}:  # YAML has keys of any type
            raise _refusal([f"{name!r}: no such setting" for name in strange])
        return cls(**given)

    @field_validator("require_headers")
    @classmethod
    def _header_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not HEADER_NAME.fullmatch(name):
                raise PolicyError(f"{name!r} is not the name of an HTTP header")
        return names

    @field_validator("webhooks")
    @classmethod
    def _webhook_names(cls, webhooks: dict[str, WebhookPolicy]) -> dict[str, WebhookPolicy]:
        for name in webhooks:
            if not WEBHOOK_NAME.fullmatch(name):
                raise PolicyError(
                    f"{name!r} is not a valid name of a webhook",
                    hint="lower-case letters, digits, - and _: it is a path",
                )
        return webhooks

    @field_validator("reject_on_body_mismatch")
    @classmethod
    def _mismatch_is_never_applied(cls, reject: bool) -> bool:
        if not reject:
            raise PolicyError(
                "cannot be false: another payload under a known key is never applied; "
                "give changed content a new source_id or revision instead"
            )
        return reject

    def for_kind(self, kind: str) -> KindRules:
        """What holds for operations of this kind: its own entry first, then its class and the defaults."""
        rules = self._rules.get(kind)
        if rules is None:
            if len(self._rules) >= 1024:  # kinds come from callers
                self._rules.clear()
            rules = self._rules[kind] = self._rules_for(kind)
        return rules

    @cached_property
    def redactor(self) -> Redaction:
        """Of payload snapshots, messages and log lines."""
        return Redaction(fields=self.redaction.fields, patterns=self.redaction.patterns)

    @cached_property
    def metadata_redactor(self) -> Redaction:
        """Of documents, whose metadata callers get back: phone numbers stay unless `redaction.patterns` names them."""
        if "patterns" in self.redaction.model_fields_set:
            return self.redactor
        return Redaction(fields=self.redaction.fields, patterns=METADATA_PATTERNS)

    @cached_property
    def _rules(self) -> dict[str, KindRules]:
        return {}

    def _rules_for(self, kind: str) -> KindRules:
        own = self.kinds.get(kind, _NOTHING_OF_ITS_OWN)
        retention = own.retention or usual_class(kind)
        usual = _USUAL.get(kind, _NOTHING_OF_ITS_OWN)
        wait_s = _first(usual.wait_s, self.wait.deadline_s) if self.wait.mode == "wait" else 0
        return KindRules(
            retention_class=retention,
            ttl_ms=round(3_600_000 * _first(own.ttl_hours, self.stores.ttl.hours(retention))),
            pending_ttl_ms=round(24 * 3_600_000 * self.stores.ttl.pending_days),
            lease_ms=round(1000 * _first(own.lease_ttl_s, self.lease.ttl_s)),
            max_attempts=own.max_attempts or usual.max_attempts or self.lease.max_attempts,
            max_runtime_ms=round(
                1000 * _first(own.max_runtime_s, _first(usual.max_runtime_s, self.lease.max_runtime_s))
            ),
            wait_ms=round(1000 * _first(own.wait_s, wait_s)),
        )


_NOTHING_OF_ITS_OWN: Final = KindPolicy()
_USUAL: Final = {
    # A build may take long, and who asks for one wants it.
    "index": KindPolicy(max_runtime_s=24 * 3600, wait_s=3600),
    "vectors": KindPolicy(max_runtime_s=6 * 3600),
    # An answer of 429 or 503 is an attempt too, and how often to try again is the client's to say.
    "http": KindPolicy(max_attempts=1000),
}


def _first(own: float | None, general: float) -> float:
    return general if own is None else own


def _broken_promises(policy: Policy) -> Iterator[str]:
    """What each field allows, and all of them together do not."""
    ttl = policy.stores.ttl
    yield from _too_short(policy, "webhook", "stores.ttl.webhook_days", ttl.webhook_days, hours_per_unit=24)
    yield from _too_short(policy, "api", "stores.ttl.api_hours", ttl.api_hours)
    for retention in ("batch", "queue", "outbox", "step"):
        field = f"stores.ttl.{retention}_days"
        yield from _too_short(policy, retention, field, getattr(ttl, f"{retention}_days"), hours_per_unit=24)
    for kind, own in policy.kinds.items():
        if own.ttl_hours is not None:
            retention = own.retention or usual_class(kind)
            yield from _too_short(policy, retention, f"kinds.{kind}.ttl_hours", own.ttl_hours)
    for place, kind in (("lease", ""), *((f"kinds.{kind}", kind) for kind in policy.kinds)):
        rules = policy.for_kind(kind)
        if rules.lease_ms > rules.max_runtime_ms:
            yield (
                f"{place}: a lease of {rules.lease_ms / 1000:g} s is longer than max_runtime_s "
                f"({rules.max_runtime_ms / 1000:g}), after which nothing is renewed"
            )
        if rules.pending_ttl_ms < rules.max_runtime_ms + rules.lease_ms:
            yield (
                f"stores.ttl.pending_days: {ttl.pending_days:g} would forget an operation while it runs; "
                f"{place} allows {rules.max_runtime_ms / 1000:g} s"
            )
    if policy.content_hash != "hmac" and policy.content_secret != ContentSecret():
        yield f"content_secret: is for content_hash: hmac, and this policy has {policy.content_hash}"
    if (also := policy.content_hash_also) is not None:
        if "content_hash" not in policy.model_fields_set:
            yield "content_hash_also: needs content_hash, which says what new documents are hashed with"
        elif policy.content_hash == "hmac":
            yield f"content_hash_also: a tenant cannot change between hmac and {also}; use another tenant"
        elif policy.content_hash == also:
            yield f"content_hash_also: must be another algorithm than content_hash, which is {also} already"
    for name, webhook in policy.webhooks.items():
        if webhook.max_body_bytes > policy.http.max_body_bytes:
            most = policy.http.max_body_bytes
            yield f"webhooks.{name}.max_body_bytes: must not be above http.max_body_bytes ({most})"
    if policy.results.inline_max_bytes > policy.results.max_bytes:
        yield f"results.inline_max_bytes: must not be above max_bytes ({policy.results.max_bytes})"


def _too_short(
    policy: Policy, retention: RetentionClass, field: str, ttl: float, *, hours_per_unit: int = 1
) -> Iterator[str]:
    horizons = dict(WEBHOOK_HORIZONS_HOURS) if retention == "webhook" else {}
    for name, provider in policy.providers.items():
        if provider.retention == retention:  # the file knows its senders better than the built-in table
            horizons[name.casefold()] = provider.retry_horizon_hours
    need = shortest_ttl(retention, horizons)
    if ttl * hours_per_unit < need.hours:
        yield f"{field}: {ttl:g} is below {need.reason}; at least {need.hours / hours_per_unit:g}"


def _explained(error: Any) -> str:
    """One problem found by pydantic, in the words of the file."""
    place = ".".join(str(part) for part in error["loc"])
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, PolicyError):
        return f"{place}: {cause.message}" + (f" ({cause.hint})" if cause.hint else "")
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _SETTINGS, n=1)
        return f"{place}: no such setting" + (f"; did you mean {near[0]!r}?" if near else "")
    if place.startswith("content_secret"):  # the secret itself may be there by mistake
        return f"{place}: must name where the secret is: content_secret: {{env: NAME}} or {{file: PATH}}"
    if (
        error["loc"][-1] in ("secret_env", "secret_file", "verify_token_env", "inbox_env")
        or "secret_env" in error["loc"]
    ):
        return f"{place}: must name where the secret is, never the secret itself"
    if error["type"] == "missing":
        return f"{place}: is missing"
    if error["type"] in ("model_type", "dict_type"):
        return f"{place}: must be a mapping, got {error['input']!r}"
    message = error["msg"].replace("Input should be", "must be").replace("a valid tuple", "a list")
    return f"{place}: {message}, got {error['input']!r}"


def _refusal(problems: list[str]) -> PolicyError:
    lines = "".join(f"\n  {problem}" for problem in problems)
    return PolicyError(f"the policy is refused:{lines}", problems=tuple(problems))


_SECTIONS: Final[tuple[type[PolicySection], ...]] = (Policy, *PolicySection.__subclasses__())
_SETTINGS: Final = frozenset(
    field.alias or name for section in _SECTIONS for name, field in section.model_fields.items()
)


def for_strangers(policy: Policy) -> Policy:
    """The policy of a server, which differs where a file says nothing of it.

    Contents of strangers are compared by sha256, which cannot be collided. A conflict shows what differs: of documents
    only digests are kept for that.
    """
    given, conflict = policy.model_fields_set, policy.on_conflict
    differs: dict[str, object] = {} if "content_hash" in given else {"content_hash": "sha256"}
    if "include_diff" not in conflict.model_fields_set:
        differs["on_conflict"] = conflict.model_copy(update={"include_diff": True})
    return policy.model_copy(update=differs)
