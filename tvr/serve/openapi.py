"""The server's own description: its OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tvr.serve import requests, responses

_REQUESTS: tuple[type[BaseModel], ...] = (
    requests.CompletionRequest,
    requests.ChatRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
)
_RESPONSES: tuple[type[BaseModel], ...] = (
    responses.Completion,
    responses.ChatCompletion,
    responses.Tokenized,
    responses.Detokenized,
    responses.Model,
    responses.ModelList,
    responses.Health,
    responses.ErrorBody,
)
_REF = "#/components/schemas/{model}"


def json_body(model: str) -> dict[str, Any]:
    """Return what a route says of its body, an object of a request model's name."""
    schema = {"$ref": _REF.format(model=model)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(
    model: str,
    *,
    body: bool = True,
    streams: bool = False,
    generates: bool = False,
    missing: bool = False,
    dead: bool = False,
) -> dict[int | str, dict[str, Any]]:
    """Return what a route answers, by status.

    Args:
        model: name of a response model, or the type of a text.
        body: it takes a body, which may be refused.
        streams: it may answer by a stream of events.
        generates: it needs the engine and a place in its queue.
        missing: what it is asked for may not be there.
        dead: it says so if the engine has ended.
    """
    is_text = model.startswith("text/")
    schema = {"type": "string"} if is_text else {"$ref": _REF.format(model=model)}
    content: dict[str, Any] = {model if is_text else "application/json": {"schema": schema}}
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"itemSchema": event}
    found: dict[int | str, dict[str, Any]] = {200: {"description": "Answer", "content": content}}
    statuses = {401: "No key, or a wrong one", 403: "Another machine's name as Host, without keys"}
    if body:
        statuses |= {
            400: "Not acceptable; the message says why",
            404: "No such model",
            408: "The body came too slowly",
            413: "The body is too long",
            415: "The body is not application/json",
            429: "The queue is full",
        }
    if missing:
        statuses[404] = "No such model"
    if generates:
        statuses[500] = "A step of the engine failed"
    if generates or dead:
        statuses[503] = "The engine has ended"
    refusal = {"$ref": _REF.format(model="ErrorBody")}
    for status, description in statuses.items():
        content = {"application/json": {"schema": refusal}}
        found[status] = {"description": description, "content": content}
    return found


def openapi_of(app: FastAPI, model_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the document; made once.

    Args:
        app: its routes are described.
        model_names: those that requests may ask for.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, taken = models_json_schema(
            [(model, "validation") for model in _REQUESTS], ref_template=_REF
        )
        _, given = models_json_schema(
            [(model, "serialization") for model in _RESPONSES], ref_template=_REF
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= taken["$defs"] | given["$defs"]
        for path in document["paths"].values():
            for operation in path.values():  # FastAPI's own refusals, none of which comes through
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for request in _REQUESTS:
            field = schemas[request.__name__]["properties"]["model"]
            # One that may be left out may be null.
            given_one = field["anyOf"][0] if "anyOf" in field else field
            given_one["enum"] = list(model_names)
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "password": {"type": "http", "scheme": "basic"},
        }
        document["security"] = [{"key": []}, {"password": []}]
        for operation in document["paths"]["/health"].values():
            operation["security"] = []
        app.openapi_schema = document
    return app.openapi_schema
