"""Nothing is accepted that nobody with a secret has signed, however it is bent."""

from __future__ import annotations

import base64
import datetime
import hmac
import time

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from ragfence.errors import PolicyError, WebhookUnverified
from ragfence.webhooks.signatures import (
    MAX_HEADER_BYTES,
    CustomSignature,
    Delivery,
    HmacSignature,
    Scheme,
    StandardSignature,
    StripeSignature,
)

NOW = 1_700_000_000.0
BODY = b'{"type": "page.updated"}'
STANDARD_SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


def standard(secret: str, body: bytes = BODY, at: float = NOW, event_id: str = "msg_1") -> Delivery:
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    signature = standardwebhooks.Webhook(secret).sign(event_id, moment, body.decode())
    headers = {"webhook-id": event_id, "webhook-timestamp": str(int(at)), "webhook-signature": signature}
    return Delivery(headers, body)


def stripe(secret: str, body: bytes = BODY, at: float = NOW) -> Delivery:
    signature = hmac.digest(secret.encode(), b"%d.%b" % (int(at), body), "sha256").hex()
    return Delivery({"stripe-signature": f"t={int(at)},v1={signature},v0=old"}, body)


def github(secret: str, body: bytes = BODY) -> Delivery:
    signature = hmac.digest(secret.encode(), body, "sha256").hex()
    return Delivery({"x-hub-signature-256": f"sha256={signature}"}, body)


def github_scheme(*secrets: str) -> HmacSignature:
    return HmacSignature(*secrets, header="X-Hub-Signature-256", prefix="sha256=")


CASES: list[tuple[Scheme, Delivery]] = [
    (StandardSignature(STANDARD_SECRET), standard(STANDARD_SECRET)),
    (StripeSignature("whsec_s"), stripe("whsec_s")),
    (github_scheme("s"), github("s")),
]


@pytest.mark.parametrize(("scheme", "delivery"), CASES)
def test_what_was_signed_is_accepted(scheme: Scheme, delivery: Delivery) -> None:
    assert scheme.verify(delivery, NOW).signature


@pytest.mark.parametrize(("scheme", "delivery"), CASES)
def test_another_body_is_refused(scheme: Scheme, delivery: Delivery) -> None:
    for body in (b"", delivery.body[:-1], delivery.body + b" ", delivery.body.replace(b"page", b"Page")):
        with pytest.raises(WebhookUnverified):
            scheme.verify(Delivery(delivery.headers, body), NOW)


@pytest.mark.parametrize(("scheme", "delivery"), CASES)
def test_a_missing_empty_cut_or_endless_header_is_refused(scheme: Scheme, delivery: Delivery) -> None:
    for name, value in delivery.headers.items():
        for other in (
            None,
            "",
            " ",
            value[: len(value) // 2],
            value + "x" * MAX_HEADER_BYTES,
            "v1,",
            "v1",
            ",",
            "t=,v1=",
            "\x00",
        ):
            headers = {**delivery.headers, name: other} if other is not None else {**delivery.headers}
            if other is None:
                del headers[name]
            with pytest.raises(WebhookUnverified):
                scheme.verify(Delivery(headers, delivery.body), NOW)


@given(header=st.text(max_size=200), body=st.binary(max_size=50))
def test_no_header_that_was_made_up_is_accepted_or_breaks_a_scheme(header: str, body: bytes) -> None:
    for scheme, delivery in CASES:
        headers = dict.fromkeys(delivery.headers, header)
        with pytest.raises(WebhookUnverified):
            scheme.verify(Delivery(headers, body), NOW)


@pytest.mark.parametrize("age_s", [-301, 301, 86_400])
@pytest.mark.parametrize("at", [0, 1])
def test_a_delivery_is_refused_outside_the_tolerance(at: int, age_s: int) -> None:
    scheme, delivery = CASES[at]
    with pytest.raises(WebhookUnverified, match="ago"):
        scheme.verify(delivery, NOW + age_s)
    scheme.verify(delivery, NOW + 299)


def test_the_timestamp_is_part_of_what_is_signed() -> None:
    old = standard(STANDARD_SECRET, at=NOW - 900)
    with pytest.raises(WebhookUnverified):
        StandardSignature(STANDARD_SECRET).verify(
            Delivery({**old.headers, "webhook-timestamp": str(int(NOW))}, old.body), NOW
        )


def test_secrets_can_be_rotated() -> None:
    other = "whsec_" + base64.b64encode(b"another secret, as long..").decode()
    both = StandardSignature(STANDARD_SECRET, other)
    both.verify(standard(STANDARD_SECRET), NOW)
    both.verify(standard(other), NOW)
    with pytest.raises(WebhookUnverified):
        StandardSignature(other).verify(standard(STANDARD_SECRET), NOW)
    StripeSignature("new", "old").verify(stripe("old"), NOW)
    github_scheme("new", "old").verify(github("old"), NOW)


def test_a_sender_that_rotates_signs_with_both_secrets() -> None:
    first, second = standard(STANDARD_SECRET), standard("whsec_" + base64.b64encode(b"x" * 24).decode())
    header = f"{second.headers['webhook-signature']} {first.headers['webhook-signature']}"
    StandardSignature(STANDARD_SECRET).verify(Delivery({**first.headers, "webhook-signature": header}, BODY), NOW)


def test_the_library_of_standard_webhooks_accepts_and_makes_the_same_signatures() -> None:
    at = time.time()
    delivery = standard(STANDARD_SECRET, at=at)
    assert standardwebhooks.Webhook(STANDARD_SECRET).verify(delivery.body, dict(delivery.headers)) is not None
    assert StandardSignature(STANDARD_SECRET).verify(delivery, at).event_id == "msg_1"


def test_the_vector_of_standard_webhooks_is_accepted() -> None:
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    scheme = StandardSignature("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    assert scheme.verify(Delivery(headers, body), 1614265330).event_id == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    with pytest.raises(WebhookUnverified):
        scheme.verify(Delivery(headers, body.replace(b"2", b"3", 1)), 1614265330)


@pytest.mark.parametrize(("scheme", "delivery"), CASES)
def test_signatures_are_compared_in_constant_time(
    scheme: Scheme, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decides is `hmac.compare_digest`: with one that says no, a right signature is refused."""
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: False)
    with pytest.raises(WebhookUnverified):
        scheme.verify(delivery, NOW)


def test_the_vector_of_githubs_documentation_is_accepted() -> None:
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    delivery = Delivery({"x-hub-signature-256": signature}, b"Hello, World!")
    github_scheme("It's a Secret to Everybody").verify(delivery, NOW)


@pytest.mark.parametrize(("algorithm", "encoding"), [("sha1", "hex"), ("sha256", "base64"), ("sha512", "base64")])
def test_a_plain_hmac_signs_what_the_provider_signs(algorithm: str, encoding: str) -> None:
    scheme = HmacSignature(
        "s",
        header="X-Sig",
        algorithm=algorithm,  # type: ignore[arg-type]  # parametrised
        encoding=encoding,  # type: ignore[arg-type]
        id_header="X-Id",
        timestamp_header="X-Time",
        signed="{id}.{timestamp}.{body}",
    )
    digest = hmac.digest(b"s", b"e1.%d.%b" % (int(NOW), BODY), algorithm)
    text = digest.hex() if encoding == "hex" else base64.b64encode(digest).decode()
    headers = {"x-sig": text, "x-id": "e1", "x-time": str(int(NOW))}
    assert scheme.verify(Delivery(headers, BODY), NOW).event_id == "e1"
    with pytest.raises(WebhookUnverified):
        scheme.verify(Delivery({**headers, "x-id": "e2"}, BODY), NOW)


def test_a_check_of_ones_own_has_to_say_true() -> None:
    CustomSignature(lambda headers, body: headers["x-token"] == "t").verify(Delivery({"x-token": "t"}, BODY), NOW)
    with pytest.raises(WebhookUnverified):
        CustomSignature(lambda headers, body: "yes").verify(Delivery({}, BODY), NOW)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "make",
    [
        lambda: StandardSignature(),
        lambda: StandardSignature("whsec_"),
        lambda: StandardSignature("whsec_***"),
        lambda: StripeSignature(""),
        lambda: HmacSignature("s", "", header="X"),
        lambda: HmacSignature("s", header="X", signed="{timestamp}.{body}"),
        lambda: HmacSignature("s", header="X", timestamp_header="T"),
        lambda: HmacSignature("s", header="X", signed="{id}{body}"),
        lambda: HmacSignature("s", header="X", signed="nothing"),
    ],
)
def test_a_scheme_that_would_accept_what_anybody_signs_is_refused(make: object) -> None:
    with pytest.raises(PolicyError):
        make()  # type: ignore[operator]


def test_a_header_that_was_sent_twice_is_not_the_first_or_the_last_of_them() -> None:
    good = github("s").headers["x-hub-signature-256"]
    twice = Delivery.of([("X-Other", "a"), ("x-other", "b"), ("X-Hub-Signature-256", good)], BODY)
    assert twice.headers["x-other"] == "a,b"
    github_scheme("s").verify(twice, NOW)
