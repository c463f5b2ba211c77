"""The HTTP source described as OpenAPI, served at `/openapi.json`."""

from typing import Any

from oncebridge.engine.verdict import Verdict
from oncebridge.http.auth import AuthOptions

_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_OUTCOME = {
    "verdict": {"enum": [verdict.value for verdict in Verdict]},
    "rule": {"type": "string", "description": "The name of the rule that decided."},
    "key": {"type": "string", "description": "The key of the event, in hex."},
    "reason": {"type": "string"},
}
_RESULT = {
    "type": "object",
    "properties": {
        "status": {
            "type": "integer",
            "description": "The status that this event alone would have.",
        },
        **_OUTCOME,
        "spooled": {"type": "boolean", "description": "Stored on disk, to be forwarded later."},
        "retry_after": {"type": "integer", "minimum": 1},
        "routes": {
            "type": "object",
            "description": "If several routes match the event: the outcome on each. The rule and the "
            "key are listed only there.",
            "additionalProperties": {
                "type": "object",
                "properties": _OUTCOME,
                "required": ["verdict", "rule", "key"],
            },
        },
    },
    "required": ["status"],
}
_RESULTS = {
    "type": "object",
    "properties": {"results": {"type": "array", "items": {"$ref": "#/components/schemas/Result"}}},
    "required": ["results"],
}
_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "source": {"type": "string"},
        "detail-type": {"type": "string"},
        "detail": {"type": "object"},
    },
    "required": ["detail"],
}
_RETRY = {
    "Retry-After": {
        "description": "Seconds to wait before sending again.",
        "schema": {"type": "integer", "minimum": 1},
        "required": True,
    }
}
_CHALLENGE = {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}}
_ALIVE = {
    "type": "object",
    "properties": {"alive": {"const": True}},
    "required": ["alive"],
}
_READY = {
    "type": "object",
    "properties": {
        "ready": {"type": "boolean"},
        "reasons": {"type": "array", "items": {"type": "string"}},
        "warnings": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["ready"],
}
_TOKEN = {
    "type": "object",
    "properties": {
        "access_token": {"type": "string"},
        "token_type": {"const": "Bearer"},
        "expires_in": {"type": "integer", "description": "Seconds."},
    },
    "required": ["access_token", "token_type", "expires_in"],
}
_FORM = {
    "type": "object",
    "properties": {
        "grant_type": {"const": "client_credentials"},
        "client_id": {"type": "string", "description": "Without Basic: the client."},
        "client_secret": {"type": "string"},
    },
    "required": ["grant_type"],
}


def _json(description: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}, **more}


def describe(path: str, auth: AuthOptions, version: str) -> dict[str, Any]:
    """Return the OpenAPI description of the endpoint at *path* and the other endpoints."""
    error = {"$ref": "#/components/schemas/Error"}
    taken = {"anyOf": [{"$ref": "#/components/schemas/Result"}, _RESULTS]}
    event = {"$ref": "#/components/schemas/Event"}
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
    post: dict[str, Any] = {
        "summary": "Send one event, an array of events, or one event per line.",
        "description": (
            "200: each event is delivered, a duplicate, or stored in the dead "
            "letters. 503: at least one has to be sent again. A body may be compressed "
            "with gzip."
        ),
        "operationId": "send",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"anyOf": [event, {"type": "array", "items": event}]}
                },
                "application/x-ndjson": {"schema": {"type": "string"}},
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
    paths: dict[str, Any] = {
        path: {"post": post},
        "/healthz": _get("Is the process alive?", {**common, "200": _json("Alive.", _ALIVE)}),
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
            "schemas": {"Event": _EVENT, "Result": _RESULT, "Error": _ERROR},
            **({"securitySchemes": schemes} if schemes else {}),
        },
    }


def _get(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": responses}}


def _token(common: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
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


def _schemes(auth: AuthOptions) -> dict[str, Any]:
    schemes: dict[str, Any] = {}
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


def _any_of(schemes: dict[str, Any]) -> list[dict[str, list[str]]]:
    """Return requirements: any one of *schemes*; a signature with its time, plus a certificate."""
    beside: dict[str, list[str]] = {_MUTUAL: []} if _MUTUAL in schemes else {}
    single = [[name] for name in schemes if name not in (*_HMAC, _MUTUAL)]
    several = [*single, *([list(_HMAC)] if "hmac" in schemes else [])]
    return [{**{name: [] for name in names}, **beside} for names in several] or [beside]
