"""A running vLLM server, as far as its GET routes tell; nothing that changes it is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_wt.bridge.register import PREFIX
from vllm_wt.cli.doctor.engine import judge_release
from vllm_wt.cli.doctor.finding import Finding
from vllm_wt.registry import VLLMS_OWN

_CALL_S = 5.0
_MAX_BYTES = 1 << 20
_PATHS = (
    "/health",
    "/version",
    "/get_world_size",
    "/is_paused",
    "/weight_info",
    "/server_info?config_format=json",
)
_DEV_CURE = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
_IS_IT = "check the URL: is it vLLM's own, scheme and port included, and without /v1?"


@dataclass(frozen=True)
class Answer:
    """What came for one GET: a status with the body as JSON, or why nothing came."""

    status: int = 0
    body: Any = None
    failure: str = ""

    def get(self, key: str) -> Any:
        return self.body.get(key) if isinstance(self.body, dict) else None

    @property
    def text(self) -> str:
        if self.failure:
            return self.failure
        return f"status {self.status}" + ("" if self.body is not None else ", no JSON")


def examine(url: str, token: str | None) -> Iterator[Finding]:
    """Findings about the server at ``url``."""
    url = url.rstrip("/")
    if url.endswith("/v1"):
        url = url.removesuffix("/v1")
        yield Finding("server-url", "warning", "looked without /v1", f"connect to {url}")
    try:
        answers = asyncio.run(_ask(url, token))
    except ImportError:
        yield Finding("server-reachable", "problem", "httpx is not installed", "pip install httpx")
        return
    health = answers["/health"]
    if health.failure:
        yield Finding("server-reachable", "problem", f"{url}: {health.failure}", _IS_IT)
        return
    yield Finding("server-reachable", "ok", url)
    refused = [path for path, answer in answers.items() if answer.status in {401, 403}]
    if refused:
        yield Finding(
            "server-token",
            "problem",
            f"{', '.join(refused)}: refused with status {answers[refused[0]].status}",
            "give the right --token (the server's --api-key, or what its proxy wants)",
        )
    if health.status == 200:
        yield Finding("server-health", "ok", "healthy")
    elif "/health" not in refused:
        cure = "look at the server's log; restart it" if health.status >= 500 else _IS_IT
        yield Finding("server-health", "problem", f"/health: {health.text}", cure)
    if "/version" not in refused:
        yield _version(answers["/version"])
    yield from _dev_routes({p: a for p, a in answers.items() if p not in refused})


def _version(answer: Answer) -> Finding:
    version = answer.get("version")
    if answer.status == 200 and isinstance(version, str):
        return judge_release("server-version", f"vLLM {version:.80}", version)
    return Finding("server-version", "problem", f"/version: {answer.text}", _IS_IT)


def _dev_routes(answers: dict[str, Answer]) -> Iterator[Finding]:
    size, paused = answers.get("/get_world_size"), answers.get("/is_paused")
    missing = [
        path
        for path, answer in (("/get_world_size", size), ("/is_paused", paused))
        if answer is not None and answer.status == 404
    ]
    if missing:
        found = f"{' and '.join(missing)}: not there"
        yield Finding("server-dev-routes", "problem", found, _DEV_CURE)
        return
    if size is not None:
        workers = size.get("world_size")
        if type(workers) is int and workers > 0:
            yield Finding("server-workers", "ok", f"{workers} workers")
        else:
            yield Finding("server-workers", "problem", f"/get_world_size: {size.text}", _IS_IT)
    if paused is not None:
        state = paused.get("is_paused")
        if state is False:
            yield Finding("server-paused", "ok", "it generates")
        elif state is True:
            found = "generation is paused: by a sync under way, or by a trainer that died"
            yield Finding("server-paused", "warning", found, "POST /resume if no sync is under way")
        else:
            yield Finding("server-paused", "problem", f"/is_paused: {paused.text}", _IS_IT)
    if "/weight_info" in answers:
        yield _weight_version(answers["/weight_info"])
    if _PATHS[-1] in answers:
        yield _weight_transfer(answers[_PATHS[-1]])


def _weight_version(answer: Answer) -> Finding:
    if answer.status == 404:
        found = "the server has no /weight_info (vLLM 0.27 and later do)"
        return Finding("server-weight-version", "skipped", found)
    if answer.status == 200 and isinstance(answer.body, dict) and "weight_version" in answer.body:
        version = answer.body["weight_version"]
        return Finding("server-weight-version", "ok", f"weight version {version!r:.80}")
    return Finding("server-weight-version", "problem", f"/weight_info: {answer.text}", _IS_IT)


def _weight_transfer(answer: Answer) -> Finding:
    """From the server's configuration, which releases may well spell differently."""
    check, config = "server-weight-transfer", answer.get("vllm_config")
    if not isinstance(config, dict) or "weight_transfer_config" not in config:
        found = f"the server doesn't tell its configuration (/server_info: {answer.text})"
        return Finding(check, "skipped", found)
    transfer = config["weight_transfer_config"]
    if isinstance(transfer, dict):
        backend = transfer.get("backend")
        if backend in VLLMS_OWN:
            return Finding(
                check,
                "warning",
                f"backend {backend!r}, which is vLLM's own",
                f"""for ours: --weight-transfer-config '{{"backend": "{PREFIX}{backend}"}}'""",
            )
        return Finding(check, "ok", f"backend {backend!r:.80}")
    return Finding(
        check,
        "problem",
        "the server was started without weight transfer",
        """start it with --weight-transfer-config '{"backend": "rdma"}'""",
    )


async def _ask(url: str, token: str | None) -> dict[str, Answer]:
    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answers = {}
    async with httpx.AsyncClient(headers=headers, timeout=_CALL_S) as client:
        for path in _PATHS:
            try:
                # A deadline on the whole call: httpx's own start anew with every byte.
                answers[path] = await asyncio.wait_for(_get(client, url + path), _CALL_S)
            except asyncio.TimeoutError:
                answers[path] = Answer(failure=f"no answer within {_CALL_S:g} s")
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                answers[path] = Answer(failure=f"{type(error).__name__}: {error}")
            if path == "/health" and answers[path].failure:
                break
    return answers


async def _get(client: Any, url: str) -> Answer:
    body = b""
    async with client.stream("GET", url) as response:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_BYTES:
                return Answer(response.status_code, failure=f"more than {_MAX_BYTES} bytes")
    try:
        return Answer(response.status_code, json.loads(body))
    except (ValueError, RecursionError):
        return Answer(response.status_code)
