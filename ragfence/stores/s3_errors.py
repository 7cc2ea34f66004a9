"""What the answers of an S3 server mean: which leave a write open, and which error a person gets to see."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from ragfence.errors import (
    Hint,
    RagfenceError,
    StoreAuth,
    StoreUnavailable,
    StoreUnsafe,
    UnknownStore,
    ValidationError,
)

BotoError = (BotoCoreError, ClientError, ResponseParserError)

_ABSENT = {"NoSuchKey", "404", "NotFound"}
_THROTTLED = {"RequestTimeout", "SlowDown", "Throttling", "TooManyRequests", "InternalError"}
_AUTH = {
    "AccessDenied",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
}
_NO_CREDENTIALS = (
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
_HINTS = {
    "InvalidAccessKeyId": "the server does not know the access key: check AWS_ACCESS_KEY_ID and endpoint",
    "SignatureDoesNotMatch": "the secret key does not fit the access key: check AWS_SECRET_ACCESS_KEY",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it",
    "ExpiredToken": "the session has expired: log in again",
    "AuthorizationHeaderMalformed": "the region is probably wrong: check AWS_REGION",
    "PermanentRedirect": Hint(
        "the bucket is in another region: set AWS_REGION or region=",
        cli="the bucket is in another region: set AWS_REGION, or add ?region=NAME to the URL",
    ),
}


def is_absent(error: Exception) -> bool:
    """A 404 for the object, not for its bucket."""
    return _status_and_code(error)[1] in _ABSENT


def lacks_credentials(error: Exception) -> bool:
    """The SDK found no credentials, so nothing was sent."""
    return isinstance(error, _NO_CREDENTIALS)


def never_sent(error: Exception) -> bool:
    """No connection came about, so the server cannot have acted. True of one request, not of an SDK retry."""
    return isinstance(error, EndpointConnectionError | ConnectTimeoutError)


def leaves_open(error: Exception) -> bool:
    """Whether a put that ended like this may have happened, or may still happen if it is repeated."""
    if isinstance(error, ClientError):
        status, code = _status_and_code(error)
        return status in (408, 409, 412, 429) or (status >= 500 and status != 501) or code in _THROTTLED | _ABSENT
    return isinstance(error, HTTPClientError | IncompleteReadError | ResponseParserError)


def brief(error: Exception | None) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, RagfenceError):
        return error.message
    status, code = _status_and_code(error)
    return f"{code} ({status})" if status else str(error)


def translate(error: Exception, what: str, bucket: str, where: str) -> RagfenceError:
    """The error for people: what could not be done, at which store, and what to do about it."""
    status, code = _status_and_code(error)
    said = f"cannot {what}, {where}: {brief(error)}"
    if isinstance(error, ClientError):
        if code == "NoSuchBucket":
            return UnknownStore(f"{where} has no bucket {bucket!r}", hint=f"create it first: aws s3 mb s3://{bucket}")
        if code in _AUTH or status in (401, 403):
            needs = "these credentials need s3:GetObject, PutObject, DeleteObject and ListBucket on the bucket"
            return StoreAuth(said, hint=_HINTS.get(code, needs))
        if status == 501:
            return StoreUnsafe(
                f"{said}: not implemented by this server", hint="use an S3 server with conditional writes"
            )
        if code in ("InvalidBucketName", "PermanentRedirect", "IllegalLocationConstraintException"):
            return UnknownStore(said, hint=_HINTS.get(code, "check the name of the bucket and its region"))
        if code == "EntityTooLarge":
            return ValidationError(said, hint="write smaller batches: an object is one single PUT")
        return StoreUnavailable(said)
    if lacks_credentials(error):
        return StoreAuth(said, hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role")
    if isinstance(error, EndpointConnectionError):
        return StoreUnavailable(said, hint="check that the server is running there and the endpoint is right")
    if isinstance(error, HTTPClientError | IncompleteReadError | ResponseParserError):
        return StoreUnavailable(said)
    return UnknownStore(said, hint="check the bucket, the region and the endpoint")


def _status_and_code(error: Exception | None) -> tuple[int, str]:
    if not isinstance(error, ClientError):
        return 0, ""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, error.response.get("Error", {}).get("Code", "")
