"""The policy: what a user may tune, and what is refused because it would break a promise.

Every default is right as it stands; a `ragfence.yml` holds only what differs. `Policy.from_mapping` is the
way in: it answers all problems of a file at once, one line each, as one `PolicyError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic import ValidationError as PydanticValidationError

from ragfence.core.redaction import DEFAULT_PATTERNS, METADATA_PATTERNS, Redaction
from ragfence.core.retention import WEBHOOK_HORIZONS_HOURS, RetentionClass, shortest_ttl, usual_class
from ragfence.errors import PolicyError

ROW_FIELDS: Final = frozenset(
    """
    row_id ts tenant kind decision phase flags idempotency_key payload_hash effect_id source_type source_id revision
    index_hash action event_id correlation_id attempt fence owner run_id route origin api_key winner first_seen
    sealed_at expires_at waited_ms error_code diff_size saved
    """.split()  # noqa: SIM905  # thirty lines of quotes say no more
)

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=365 * 24 * 3600)]


class _Section(BaseModel):
    # Strict: `max_attempts: true` and `include_diff: "no"` are mistakes, not numbers and switches.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_the_default(cls, given: Any) -> Any:
        # `lease:` with all its lines commented out is a null in YAML.
        if isinstance(given, Mapping):
            return {name: value for name, value in given.items() if value is not None}
        return given


# YAML has lists, the models have tuples.
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]


class TtlRules(_Section):
    """How long a sealed record answers, from its seal on; `pending_days` counts from the last attempt."""

    webhook_days: float = Field(default=14, gt=0, le=3650)
    api_hours: float = Field(default=48, gt=0, le=87600)
    batch_days: float = Field(default=3, gt=0, le=3650)
    pending_days: float = Field(default=7, gt=0, le=3650)

    def hours(self, retention: RetentionClass) -> float:
        if retention == "api":
            return self.api_hours
        return 24 * (self.webhook_days if retention == "webhook" else self.batch_days)


class StoreRules(_Section):
    fence: Literal["sqlite", "redis"] | None = None
    """what the fence must be opened on; None takes any"""
    ttl: TtlRules = TtlRules()


class LoggingRules(_Section):
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

    @field_validator("include_fields")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in ROW_FIELDS:
                near = difflib.get_close_matches(name, ROW_FIELDS, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(ROW_FIELDS))}"
                raise PolicyError(f"{name!r} is no field of a decision row; {advice}")
        return names


class OnConflict(_Section):
    status: Literal[409, 422] = 409
    include_diff: bool = False
    """keep redacted payloads, so that a conflict can show what differs"""
    max_diff_bytes: int = Field(default=16384, ge=0, le=1 << 20)


class LeaseRules(_Section):
    ttl_s: float = Field(default=30, ge=0.05, le=24 * 3600)
    max_runtime_s: Seconds = 3600
    max_attempts: int = Field(default=5, ge=1, le=10_000)
    seal_retry_s: float = Field(default=10, ge=0, le=3600)


class WaitRules(_Section):
    mode: Literal["wait", "raise"] = "wait"
    deadline_s: float = Field(default=60, ge=0, le=24 * 3600)


class DurabilityRules(_Section):
    """What a seal waits for on Redis, beside the primary's memory. Too few in time: the seal is tried again."""

    wait_replicas: int = Field(default=0, ge=0, le=64)
    """replicas that must have it, by WAIT"""
    wait_aof: bool = False
    """on the disk of the primary too, and of `wait_replicas` replicas, by WAITAOF"""
    wait_timeout_ms: int = Field(default=1000, ge=1, le=600_000)

    @property
    def confirms(self) -> bool:
        return self.wait_replicas > 0 or self.wait_aof


class ResultRules(_Section):
    inline_max_bytes: int = Field(default=1 << 18, ge=0, le=1 << 20)
    max_bytes: int = Field(default=1 << 26, ge=0, le=1 << 30)


class DocumentRules(_Section):
    """What documents may be, how they are cut, and how long what they were is kept."""

    max_text_bytes: int = Field(default=1 << 24, ge=1, le=1 << 30)
    max_metadata_bytes: int = Field(default=1 << 16, ge=2, le=1 << 24)
    allow_empty_text: bool = False
    """else a document without text, or of white space alone, is refused: no search can find it"""
    content_fields: Names = ()
    """metadata fields that count as content: another value is another revision, chunked and embedded anew"""
    chunk_size: int = Field(default=1000, ge=1, le=1 << 20)
    chunk_overlap: int = Field(default=0, ge=0, le=1 << 19)
    keep_superseded_days: float = Field(default=30, ge=0, le=3650)
    """after that `compact` drops superseded revisions: their content is new again"""
    max_prune_share: float = Field(default=0.1, ge=0, le=1)
    """a sync that would retract a larger share of the live documents is refused, unless it is asked for"""

    @model_validator(mode="after")
    def _overlap_fits(self) -> DocumentRules:
        if self.chunk_overlap >= self.chunk_size:
            raise PolicyError(f"chunk_overlap must be below chunk_size ({self.chunk_size})")
        return self


class IndexRules(_Section):
    """How indexes are built and verified, what an alias may be moved to, and which builds stay."""

    keep_targets: int = Field(default=3, ge=1, le=100)
    """so many earlier builds of every alias, beside the live one, are kept by gc for a rollback"""
    max_shrinkage: float = Field(default=0.2, ge=0, le=1)
    """the share of the live build's rows that the next one may lack"""
    min_coverage: float = Field(default=0.0, ge=0, le=1)
    """of the live documents; 0 does not look"""
    min_overlap: float = Field(default=0.0, ge=0, le=1)
    """of what the new and the live build find; 0 does not look, unless there are golden queries"""
    golden: str = ""
    """a file of golden queries; empty: none"""
    min_recall: float = Field(default=0.9, ge=0, le=1)
    """of all golden queries together"""
    overlap_queries: int = Field(default=20, ge=1, le=1000)
    embed_workers: int = Field(default=2, ge=1, le=64)
    max_self_recall_sample: int = Field(default=64, ge=0, le=10_000)
    """so many rows of a new build must find themselves before it is sealed"""
    min_self_recall: float = Field(default=0.99, ge=0, le=1)
    ann_above: int = Field(default=100_000, ge=0, le=1 << 40)
    """an index with more rows is approximate, unless its spec says which index it is to be"""
    recall_sample: int = Field(default=128, ge=1, le=10_000)
    """so many searches of an approximate index are compared with exact ones before it is sealed"""
    min_ann_recall: float = Field(default=0.9, ge=0, le=1)
    """the share of what an exact search finds that an approximate index must find; 0 does not look"""


class Http(_Section):
    """The contract over HTTP: what a request with an `Idempotency-Key` may hold, and is told while another runs."""

    in_progress: Literal[202, 409] = 202
    """what a request gets while another one with its key is being performed"""
    wait_s: float = Field(default=0, ge=0, le=3600)
    """so long it waits for that one first"""
    max_body_bytes: int = Field(default=4 << 20, ge=0, le=1 << 30)
    max_stored_bytes: int = Field(default=1 << 20, ge=0, le=1 << 30)
    """a longer answer is given once, and replays are told that it was too long to keep"""
    max_batch_bytes: int = Field(default=1 << 26, ge=0, le=1 << 32)
    """of the body of a batch of documents, which is spooled to a file"""
    max_batch_lines: int = Field(default=10_000, ge=1, le=1_000_000)
    quotas: Names = ()
    """of every tenant, such as `600/minute`; none: no tenant is limited"""
    tenant_quotas: Annotated[dict[str, Names], Field(strict=False)] = {}
    """of single tenants, instead of `quotas`"""
    backends: Names = ("lance",)
    """that a build over HTTP may name: a URL of a stranger's choice would make the server write there"""
    embedders: Names = ("wordllama", "minilm")
    """that a build over HTTP may name"""
    answer_within_s: float = Field(default=25, gt=0, le=3600)
    """of a request without X-Request-Timeout: then it is told where to ask how far it is"""
    tenant_share: float = Field(default=1, gt=0, le=64)
    """a tenant may hold at most so many times what is free of the server: requests, arriving bodies and their bytes"""
    tenant_threads: int = Field(default=8, ge=1, le=64)
    """of the server's threads, that one tenant may use at the same time"""
    max_arriving: int = Field(default=1024, ge=1, le=100_000)
    """requests of all tenants whose body is still arriving"""
    max_arriving_bytes: int = Field(default=1 << 28, ge=1, le=1 << 40)
    """of those bodies together"""
    max_unfinished_bytes: int = Field(default=1 << 30, ge=1, le=1 << 40)
    """of the batches that arrive or are worked on, of all tenants: temporary files of this size"""
    body_grace_s: float = Field(default=10, gt=0, le=3600)
    """so long a body may take whatever its size; one second more for every `min_body_rate` bytes that came"""
    min_body_rate: int = Field(default=1 << 14, ge=1, le=1 << 30)
    """bytes a second"""
    max_builds: int = Field(default=2, ge=1, le=64)
    """of one tenant, at the same time in one process; more are answered with 429"""
    build_threads: int = Field(default=8, ge=1, le=64)
    """of one process, for the builds of all tenants"""


class AuditRules(_Section):
    """The ledger: decision rows that were drained into Parquet objects, and how long they stay there."""

    keep_days: float = Field(default=400, gt=0, le=36500)
    drain_every_s: float = Field(default=60, ge=0, le=24 * 3600)
    """how often the API server drains; 0: never, somebody else does"""
    drain_batch_rows: int = Field(default=50_000, ge=1, le=1_000_000)
    min_files: int = Field(default=16, ge=2, le=10_000)
    """so many small objects of one day are made into one"""
    compact_below_bytes: int = Field(default=8 << 20, ge=1, le=1 << 30)
    """what a small object is"""


class RedactionRules(_Section):
    fields: Names = ()
    """beside the default fields, which always apply"""
    patterns: Names = DEFAULT_PATTERNS

    @field_validator("fields")
    @classmethod
    def _usable_fields(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        return Redaction(fields=fields, patterns=()).fields

    @field_validator("patterns")
    @classmethod
    def _usable_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return Redaction(patterns=patterns).patterns


class ContentSecret(_Section):
    """Where the secret of `content_hash: hmac` is found; never the secret itself. `{tenant}` stands for the tenant."""

    env: str = ""
    """an environment variable; RAGFENCE_CONTENT_SECRET, unless there is a file"""
    file: str = ""

    @model_validator(mode="after")
    def _one_place(self) -> ContentSecret:
        if self.env and self.file:
            raise PolicyError("names a file and an environment variable; keep one of them")
        return self


class KindPolicy(_Section):
    """What differs for one kind of operation."""

    retention: RetentionClass | None = Field(default=None, alias="class")
    lease_ttl_s: float | None = Field(default=None, ge=0.05, le=24 * 3600)
    max_attempts: int | None = Field(default=None, ge=1, le=10_000)
    max_runtime_s: Seconds | None = None
    wait_s: float | None = Field(default=None, ge=0, le=24 * 3600)
    ttl_hours: float | None = Field(default=None, gt=0, le=87600)


class ProviderPolicy(_Section):
    """A sender who repeats what was not acknowledged."""

    retention: RetentionClass = Field(default="webhook", alias="class")
    retry_horizon_hours: float = Field(ge=0, le=43800)


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
    """0: answer at once that somebody else is at it"""
    source_ttl_ms: int = field(init=False, compare=False)
    """0: for ever"""

    def __post_init__(self) -> None:
        # A claim must not shorten the memory of the top sequence, nor a seal that of a pending lease.
        forever = self.ttl_ms == 0 or self.pending_ttl_ms == 0
        object.__setattr__(self, "source_ttl_ms", 0 if forever else max(self.ttl_ms, self.pending_ttl_ms))


class Policy(_Section):
    """Frozen; build it with `Policy()`, `Policy.from_mapping(...)` or `load_policy("ragfence.yml")`."""

    require_headers: Names = ("Idempotency-Key",)
    reject_on_body_mismatch: bool = True
    stores: StoreRules = StoreRules()
    logging: LoggingRules = LoggingRules()
    on_conflict: OnConflict = OnConflict()
    lease: LeaseRules = LeaseRules()
    wait: WaitRules = WaitRules()
    on_store_error: Literal["closed", "open"] = "closed"
    durability: DurabilityRules = DurabilityRules()
    results: ResultRules = ResultRules()
    documents: DocumentRules = DocumentRules()
    indexes: IndexRules = IndexRules()
    http: Http = Http()
    audit: AuditRules = AuditRules()
    redaction: RedactionRules = RedactionRules()
    content_hash: Literal["xxh3", "sha256", "hmac"] = "xxh3"
    content_secret: ContentSecret = ContentSecret()
    kinds: dict[str, KindPolicy] = {}
    providers: dict[str, ProviderPolicy] = {}

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except PydanticValidationError as invalid:
            raise _refusal([_explained(error) for error in invalid.errors(include_url=False)]) from None
        if problems := list(_broken_promises(self)):
            raise _refusal(problems)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Policy:
        """The policy of a parsed file. All its problems are told at once, in one `PolicyError`."""
        if strange := {name for name in given if type(name) is not str}:  # YAML has keys of any type
            raise _refusal([f"{name!r}: no such setting" for name in strange])
        return cls(**given)

    @field_validator("require_headers")
    @classmethod
    def _header_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HEADER.fullmatch(name):
                raise PolicyError(f"{name!r} is no name of an HTTP header")
        return names

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
    yield from _too_short(policy, "batch", "stores.ttl.batch_days", ttl.batch_days, hours_per_unit=24)
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
    if place.startswith("content_secret"):  # somebody may have put the secret itself there
        return f"{place}: must name where the secret is: content_secret: {{env: NAME}} or {{file: PATH}}"
    if error["type"] == "missing":
        return f"{place}: is missing"
    if error["type"] in ("model_type", "dict_type"):
        return f"{place}: must be a mapping, got {error['input']!r}"
    message = error["msg"].replace("Input should be", "must be").replace("a valid tuple", "a list")
    return f"{place}: {message}, got {error['input']!r}"


def _refusal(problems: list[str]) -> PolicyError:
    lines = "".join(f"\n  {problem}" for problem in problems)
    return PolicyError(f"the policy is refused:{lines}", problems=tuple(problems))


_SECTIONS: Final[tuple[type[_Section], ...]] = (Policy, *_Section.__subclasses__())
_SETTINGS: Final = frozenset(
    field.alias or name for section in _SECTIONS for name, field in section.model_fields.items()
)


def for_strangers(policy: Policy) -> Policy:
    """The policy of a server, which differs where a file says nothing of it.

    Contents of strangers are compared by sha256, which nobody can collide. A conflict tells what differs: of documents
    only digests are kept for that.
    """
    given, conflict = policy.model_fields_set, policy.on_conflict
    differs: dict[str, object] = {} if "content_hash" in given else {"content_hash": "sha256"}
    if "include_diff" not in conflict.model_fields_set:
        differs["on_conflict"] = conflict.model_copy(update={"include_diff": True})
    return policy.model_copy(update=differs)
