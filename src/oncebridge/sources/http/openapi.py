"""The HTTP source described as OpenAPI, served at `/openapi.json`."""

from typing import Any

from oncebridge.engine.verdict import Verdict
from oncebridge.http.auth import AuthOptions

_STRING = {"type": "string"}
_Json = dict[str, Any]


def _object(properties: _Json, *required: str) -> _Json:
    return {"type": "object", "properties": properties, "required": [*required]}


def _list_of(items: _Json) -> _Json:
    return {"type": "array", "items": items}


def _text(description: str, kind: str = "string") -> _Json:
    return {"type": kind, "description": description}


def _ref(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(description: str, schema: _Json, **more: Any) -> _Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}, **more}


_OUTCOME = {
    "verdict": {"enum": [verdict.value for verdict in Verdict]},
    "rule": _text("The name of the rule that decided."),
    "key": _text("The key of the event, in hex."),
    "reason": _STRING,
}
_RESULT = _object(
    {
        "status": _text("The status that this event alone would have.", "integer"),
        **_OUTCOME,
        "spooled": _text("Stored on disk, to be forwarded later.", "boolean"),
        "retry_after": {"type": "integer", "minimum": 1},
        "routes": {
            **_text(
                "If several routes match the event: the outcome on each. The rule and the key are "
                "listed only there.",
                "object",
            ),
            "additionalProperties": _object(_OUTCOME, "verdict", "rule", "key"),
        },
    },
    "status",
)
_RESULTS = _object({"results": _list_of(_ref("Result"))}, "results")
_EVENT = _object(
    {"id": _STRING, "source": _STRING, "detail-type": _STRING, "detail": {"type": "object"}},
    "detail",
)
_RETRY = {
    "Retry-After": {
        "description": "Seconds to wait before sending again.",
        "schema": {"type": "integer", "minimum": 1},
        "required": True,
    }
}
_CHALLENGE = {"WWW-Authenticate": {"schema": _STRING, "required": True}}
_READY = _object(
    {
        "ready": {"type": "boolean"},
        "reasons": _list_of(_STRING),
        "warnings": _list_of(_STRING),
    },
    "ready",
)
_TOKEN = _object(
    {
        "access_token": _STRING,
        "token_type": {"const": "Bearer"},
        "expires_in": _text("Seconds.", "integer"),
    },
    *("access_token", "token_type", "expires_in"),
)
_FORM = _object(
    {
        "grant_type": {"const": "client_credentials"},
        "client_id": _text("Without Basic: the client."),
        "client_secret": _STRING,
    },
    "grant_type",
)


def describe(path: str, auth: AuthOptions, version: str) -> _Json:
    """Return the OpenAPI description of the endpoint at *path* and the other endpoints."""
    error, event = _ref("Error"), _ref("Event")
    taken = {"anyOf": [_ref("Result"), _RESULTS]}
    common = {
        "400": _json("The request is malformed.", error),
        "408": _json("The request took too long to arrive.", error),
        "411": _json("The request has no Content-Length and is not chunked.", error),
        "413": _json("The body is larger than the limit.", error),
        "417": _json("Expect supports only 100-continue.", error),
        "431": _json("The headers are larger than the limit.", error),
        "501": _json("The method or the transfer coding is not supported.", error),
        "503": _json("Too many connections.", error, headers=_RETRY),
        "505": _json("Only HTTP/1.0 and HTTP/1.1 are supported.", error),
    }
    post: _Json = {
        "summary": "Send one event, an array of events, or one event per line.",
        "description": "200: each event is delivered, a duplicate, or stored in the dead letters. "
        "503: at least one has to be sent again. A body may be compressed with gzip.",
        "operationId": "send",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"anyOf": [event, _list_of(event)]}},
                "application/x-ndjson": {"schema": _STRING},
            },
        },
        "responses": {
            **common,
            "200": _json("Each event is delivered, a duplicate, or in the dead letters.", taken),
            "202": _json("Each event is stored on disk (with a spool).", taken),
            "413": _json("The body is larger than the limit, or has too many events.", error),
            "415": _json("The content encoding is not gzip.", error),
            "503": _json(
                "Send again: at least one event is not delivered.",
                {"anyOf": [taken, error]},
                headers=_RETRY,
            ),
        },
    }
    schemes = _schemes(auth)
    if not schemes or auth.basic:
        post["responses"]["403"] = _json("A web page of another site sent this.", error)
    if not schemes:
        why = "The source has no auth, and the Host is not a name of this machine."
        post["responses"]["401"] = _json(why, error)
    if schemes:
        post["security"] = _any_of(schemes)
        post["responses"]["401"] = _json("Not authenticated.", error, headers=_CHALLENGE)
    not_ready = {"anyOf": [_READY, error]}
    paths: _Json = {
        path: {"post": post},
        "/healthz": _get(
            "Is the process alive?",
            {**common, "200": _json("Alive.", _object({"alive": {"const": True}}, "alive"))},
        ),
        "/readyz": _get(
            "Does it accept events now?",
            {
                **common,
                "200": _json("Ready.", _READY),
                "503": _json("Not now; the response has the reasons.", not_ready, headers=_RETRY),
            },
        ),
        "/openapi.json": _get(
            "This description.", {**common, "200": _json("OpenAPI 3.1.", {"type": "object"})}
        ),
    }
    if auth.oauth:
        paths["/oauth/token"] = {"post": _token(common, error)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "oncebridge",
            "version": version,
            "description": "Every EventBridge event, delivered once.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                "Event": _EVENT,
                "Result": _RESULT,
                "Error": _object({"error": _STRING}, "error"),
            },
            **({"securitySchemes": schemes} if schemes else {}),
        },
    }


def _get(summary: str, responses: _Json) -> _Json:
    return {"get": {"summary": summary, "responses": responses}}


def _token(common: _Json, error: _Json) -> _Json:
    return {
        "summary": "Get a bearer token (OAuth 2.0, client credentials).",
        "description": "The client is in the form or in Basic, not in both.",
        "operationId": "token",
        "requestBody": {
            "required": True,
            "content": {"application/x-www-form-urlencoded": {"schema": _FORM}},
        },
        "responses": {
            **common,
            "200": _json("A token, valid for an hour.", _TOKEN),
            "401": _json("Unknown client, or wrong secret.", error, headers=_CHALLENGE),
            "429": _json("Too many wrong credentials; wait a minute.", error, headers=_RETRY),
        },
    }


def _schemes(auth: AuthOptions) -> _Json:
    schemes: _Json = {}
    if auth.api_keys:
        schemes["apiKey"] = {"type": "apiKey", "in": "header", "name": auth.api_key_header}
    if auth.basic:
        schemes["basic"] = {"type": "http", "scheme": "basic"}
    if auth.bearer or auth.oauth or auth.jwt:
        schemes["bearer"] = {"type": "http", "scheme": "bearer"}
    if auth.client_ca:
        schemes[_MUTUAL] = {"type": "mutualTLS"}
    if auth.hmac:
        for name, header in _HMAC.items():
            schemes[name] = {"type": "apiKey", "in": "header", "name": header}
    return schemes


_MUTUAL = "mutualTLS"
_HMAC = {"hmac": "X-Oncebridge-Signature", "hmacTime": "X-Oncebridge-Timestamp"}


def _any_of(schemes: _Json) -> list[dict[str, list[str]]]:
    """Return requirements: any one of *schemes*; a signature with its time, plus a certificate."""
    beside: dict[str, list[str]] = {_MUTUAL: []} if _MUTUAL in schemes else {}
    single = [[name] for name in schemes if name not in (*_HMAC, _MUTUAL)]
    several = [*single, *([list(_HMAC)] if "hmac" in schemes else [])]
    return [{**{name: [] for name in names}, **beside} for names in several] or [beside]
