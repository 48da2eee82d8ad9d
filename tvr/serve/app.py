"""The FastAPI application: routes, and how errors leave it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tvr import __version__
from tvr.errors import RequestError
from tvr.serve.errors import ApiError, bad_request, check_model, json_response
from tvr.serve.openapi import answers, json_body, openapi_of
from tvr.serve.page import load_page
from tvr.serve.service import Service

#: Characters of a path that its refusal repeats.
_LONGEST_PATH = 200

_DEAD = "The engine has ended"

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service) -> FastAPI:
    """Return the application of a service. The gate with its keys goes before it."""
    app = FastAPI(
        title="tvr",
        version=__version__,
        description="An OpenAI-compatible server.",
        docs_url=None,  # pages that fetch scripts from the network
        redoc_url=None,
        redirect_slashes=False,
    )
    names = service.settings.model_names
    app.openapi = lambda: openapi_of(app, names)  # type: ignore[method-assign]
    _add_handlers(app)
    _add_generation(app, service)
    _add_rest(app, service)
    _add_page(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/completions",
        openapi_extra=json_body("CompletionRequest"),
        responses=answers("Completion", streams=True, generates=True),
    )
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        return await service.completions(request)

    @app.post(
        "/v1/chat/completions",
        openapi_extra=json_body("ChatRequest"),
        responses=answers("ChatCompletion", streams=True, generates=True),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await service.chat(request)

    @app.post(
        "/tokenize", openapi_extra=json_body("TokenizeRequest"), responses=answers("Tokenized")
    )
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or a conversation."""
        return await service.tokenize(request)

    @app.post(
        "/detokenize",
        openapi_extra=json_body("DetokenizeRequest"),
        responses=answers("Detokenized"),
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await service.detokenize(request)


def _add_rest(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=answers("ModelList", body=False))
    async def models() -> Response:
        """List the names that requests may ask for."""
        return json_response({"object": "list", "data": service.models()})

    @app.get("/v1/models/{name:path}", responses=answers("Model", body=False, missing=True))
    async def model(name: str) -> Response:
        """Return one of them."""
        check_model(name, service.settings.model_names)
        (found,) = (m for m in service.models() if m["id"] == name)
        return json_response(found)

    @app.get("/health", responses=answers("Health", body=False, dead=True))
    async def health() -> Response:
        """Say whether requests are served; open to all."""
        if not service.engine.is_alive:
            refusal = ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the engine has ended", code="engine_dead"
            )
            return refusal.response()
        return json_response({"status": "ok"})

    @app.head("/health", response_class=Response, responses={503: {"description": _DEAD}})
    async def health_without_body() -> Response:
        """Say the same by the status alone, as balancers of load ask."""
        return await health()

    @app.get("/metrics", response_class=Response, responses=answers("text/plain", body=False))
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(service.metrics.render(), headers={"Content-Type": _METRICS_TYPE})


def _add_page(app: FastAPI) -> None:
    content, headers = load_page()

    @app.get("/", response_class=Response, responses=answers("text/html", body=False))
    async def page() -> Response:
        """Return a page to chat with the model."""
        return Response(content, headers=headers)


def _add_handlers(app: FastAPI) -> None:
    """Let every error leave as an error object."""

    async def of_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def of_the_engine(request: Request, error: Exception) -> Response:
        return bad_request(str(error)).response()

    async def of_the_router(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        path = request.scope["path"][:_LONGEST_PATH]
        message = f"{status.phrase}: {request.method} {path!r}"
        headers: dict[str, Any] = dict(error.headers or {})
        return ApiError(status, message, headers=headers).response()

    async def of_nobody(request: Request, error: Exception) -> Response:
        # The server's log has the traceback.
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return ApiError(status, "an error of the server; its log says more").response()

    app.add_exception_handler(ApiError, of_ours)
    app.add_exception_handler(RequestError, of_the_engine)
    app.add_exception_handler(HTTPException, of_the_router)
    app.add_exception_handler(Exception, of_nobody)
