"""A small client of the cluster's own HTTP API, for the command line and the leader.

On the standard library: `headrace status` and `headrace chat` are quick to start.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headrace.core.card import Role
from headrace.core.errors import HeadraceError
from headrace.core.metrics import Metric
from headrace.core.states import ReplicaState


class ApiError(HeadraceError):
    """The cluster answered with an error, or not at all."""

    code = "api_error"


class NoAnswer(ApiError):
    """Nobody answered at all."""


@dataclass(frozen=True, slots=True)
class HttpApi:
    """One cluster's API. `key` is sent as bearer token when given."""

    url: str
    key: str = field(default="", repr=False)

    def ready(self) -> bool:
        """Whether `/ready` answers 200."""
        try:
            with self._open("/ready", None, 2.0):
                return True
        except ApiError:
            return False

    def check_reached(self) -> None:
        """Raises `NoAnswer` unless somebody answers, be it with an error."""
        try:
            with self._open("/ready", None, 5.0):
                pass
        except NoAnswer:
            raise
        except ApiError:
            pass

    def metrics(self) -> list[Sample]:
        """The samples of `/metrics`. Raises `ApiError`."""
        with self._open("/metrics", None, 5.0) as answer:
            text = str(answer.read().decode())
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    def ready_replicas(
        self, pools: Sequence[Role] = (Role.PREFILL, Role.DECODE)
    ) -> tuple[int, ...]:
        """Replicas of each of `pools` that the router may give work to. Raises `ApiError`."""
        counts = {
            sample.labels["pool"]: int(sample.value)
            for sample in self.metrics()
            if sample.name == Metric.REPLICAS and sample.labels["state"] == ReplicaState.READY
        }
        return tuple(counts.get(pool, 0) for pool in pools)

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> Iterator[dict[str, Any]]:
        """Stream one chat completion: the parsed chunks as they come.

        Raises `ApiError` for an error answer, an error event inside the stream, or a stream that
        ends without its end mark."""
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._open("/v1/chat/completions", body, 600.0) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ApiError(str(chunk["error"].get("message", "error")))
                yield chunk
        raise ApiError("the answer broke off")

    def _open(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        request = urllib.request.Request(self.url + path)
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            # no proxy: the cluster is on this host or named by its address
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ApiError(_error_text(error)) from None
        except (OSError, ValueError) as error:
            raise NoAnswer(f"no answer from {self.url}: {_in_words(error)}") from None


def _in_words(error: OSError | ValueError) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(cause.strerror or cause) if isinstance(cause, OSError) else str(cause)


def _error_text(error: urllib.error.HTTPError) -> str:
    try:
        return f"{error.code}: {json.loads(error.read())['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.code}: {error.reason}"
