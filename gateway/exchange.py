"""One HTTP request and its answer: identity, span, error shape and counters around every handler."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from opentelemetry import trace

from gateway.anthropic.dialect import ANTHROPIC, speaks_anthropic
from gateway.dialect import OPENAI, Dialect
from gateway.errors import as_api_error
from gateway.limits.headers import Standing, anthropic_headers, openai_headers
from gateway.policy import PolicySnapshot
from gateway.request_account import CLIENT_LEFT, RequestAccount
from gateway.services import Services
from shared.config import GatewayConfig
from shared.identifiers import random_hex
from shared.telemetry import SpanAttribute, SpanName, extract

logger = logging.getLogger(__name__)


_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
POLICY_VERSION_HEADER = "x-headrace-policy-version"
_METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))


@dataclass(slots=True)
class Exchange:
    """What belongs to one HTTP request."""

    request_id: str  # the client's, if it is fit to be echoed; never used inside
    span: trace.Span
    dialect: Dialect = OPENAI
    arrived_at: float = field(default_factory=time.monotonic)
    account: RequestAccount | None = None  # None: not a request for a model, or it did not come so far
    error_code: str | None = None  # of the answer, if it is an error
    policy: PolicySnapshot | None = None  # that this request sees, whatever is published meanwhile
    limit_headers: dict[str, str] = field(default_factory=dict)  # where its limits stand, once that is known

    @property
    def options(self) -> GatewayConfig:
        """Of the policy that this request sees."""
        assert self.policy is not None, "who is admitted sees one"
        return self.policy.options

    @property
    def headers(self) -> dict[str, str]:
        headers = dict.fromkeys(self.dialect.id_headers, self.request_id)
        if self.policy is not None:
            headers[POLICY_VERSION_HEADER] = str(self.policy.version)
        return headers | self.limit_headers

    def tell_limits(self, standing_of: dict[str, Standing]) -> None:
        self.limit_headers = openai_headers(standing_of)
        if self.dialect is ANTHROPIC:
            self.limit_headers |= anthropic_headers(standing_of)


def fresh_exchange_id() -> str:
    return f"req-{random_hex(12)}"


def exchange_of(request: web.Request) -> Exchange:
    exchange: Exchange = request["exchange"]
    return exchange


def exchange_middleware(services: Services) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-request-id", "")
        request_id = given if _ACCEPTABLE_ID.fullmatch(given) else fresh_exchange_id()
        span = _start_span(request, services)
        dialect = ANTHROPIC if speaks_anthropic(request.path, request.headers) else OPENAI
        exchange = request["exchange"] = Exchange(request_id, span, dialect)
        status = 500
        try:
            response = await handler(request)
        except asyncio.CancelledError:  # the client left; see handler_cancellation in gateway/main.py
            status = CLIENT_LEFT
            raise
        except Exception as error:  # the last place where an answer can still be made
            response = _answer(error, exchange)
            status = response.status
        else:
            status = response.status
        finally:
            method = request.method if request.method in _METHODS else "other"
            services.metrics.http_requests.labels(_route_template(request), method, str(status)).inc()
            span.set_attribute(SpanAttribute.HTTP_STATUS, status)
            if status >= 500:
                span.set_status(trace.StatusCode.ERROR)
            span.end()
            account = exchange.account
            if account is not None and not account.outlives_exchange:
                services.ledger.close(account, status, exchange.error_code)
        if not response.prepared:
            response.headers.update(exchange.headers)
            if services.is_draining:
                response.force_close()  # the next request of this client goes to another gateway
        return response

    return middleware


def _start_span(request: web.Request, services: Services) -> trace.Span:
    if not services.tracing.enabled:
        return trace.INVALID_SPAN
    carrier = {
        name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers
    }
    return services.tracing.tracer.start_span(
        SpanName.HTTP_REQUEST,
        context=extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={
            SpanAttribute.HTTP_METHOD: request.method,
            SpanAttribute.HTTP_ROUTE: _route_template(request),
        },
    )


def _route_template(request: web.Request) -> str:
    """Never the path itself: scanners would make a time series of each one they try."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


def _answer(error: Exception, exchange: Exchange) -> web.Response:
    told = as_api_error(error)
    if told.status == 500:
        logger.error("request %s failed", exchange.request_id, exc_info=error)
        exchange.span.record_exception(error)
    exchange.error_code = told.code
    if told.code is not None:
        exchange.span.set_attribute(SpanAttribute.ERROR_TYPE, told.code)
    return exchange.dialect.refusal(told, exchange.request_id)
