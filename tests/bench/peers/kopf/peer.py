"""The handlers of Berth's plugins as an operator of kopf. The README.md beside this folder has the environment variables.

What was chosen, and why:

- `@kopf.on.event`, and no `on.create`, `on.update` or `timer`: those keep their progress in annotations or in the status, or set a
  finalizer, which are requests to the API server that no other peer makes.
- kopf retries no event handler, so `Controller` repeats failures itself, after a backoff. There is no resync: RESYNC_SECONDS is ignored.
- kopf has no limit of running handlers; its `worker_limit` counts workers, which linger for seconds after their last event. So CONCURRENCY
  is a semaphore of each controller, and `worker_limit` stays unset.
- The writes go through an aiohttp session of the operator's own: kopf's `patch` argument writes the metadata before the status, and cannot
  carry a resourceVersion in a merge patch of the status alone.
- kopf has no cache and does not tell when a list has come to its end. `synced` says that the operator has started; the lists follow.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import aiohttp
import kopf
from aiohttp import web
from yarl import URL

BACKOFF_BASE = 1.0
BACKOFF_MAX = 300.0
# Mirrors the phase of a ReportJob.
LABEL = "workqueue.acme.io/phase"
# The failure of a ReportJob that is the last one.
ATTEMPTS = 5

log = logging.getLogger("operator")


class Failure(Exception):
    """Why a reconcile has to be repeated."""


@dataclass
class Counts:
    """What the controllers did."""

    reconciles: int = 0
    errors: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, address: str) -> None:
        """Serves GET /count from now on."""
        host, _, port = address.rpartition(":")
        app = web.Application()
        app.router.add_get("/count", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, int(port)).start()

    async def _answer(self, _request: web.Request) -> web.Response:
        return web.json_response({"reconciles": self.reconciles, "errors": self.errors, "synced": self.ready.is_set()})


@dataclass
class Item:
    """An object that has work to do, or waits."""

    body: dict[str, Any]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: bool = False
    generation: int = 0
    failures: int = 0
    until: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Controller:
    """Runs a reconcile function: some objects at once, each object once at a time, and again after a failure.

    The function returns after how many seconds it wants to run again, or None.
    """

    def __init__(self, reconcile: Callable[[dict[str, Any]], Awaitable[float | None]], counts: Counts, concurrency: int) -> None:
        self._reconcile = reconcile
        self._counts = counts
        self._slots = asyncio.Semaphore(concurrency)
        self._items: dict[str, Item] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def on_event(self, event: kopf.RawEvent, **_: Any) -> None:
        """The event handler; kopf calls it for each event of an object, in order."""
        body = event["object"]
        uid = body["metadata"]["uid"]
        if event["type"] == "DELETED":
            if item := self._items.pop(uid, None):
                item.gone = True
                self._stop(item)
            return
        item = self._items.setdefault(uid, Item(body))
        item.body = body
        await self._run(uid, item)

    async def _run(self, uid: str, item: Item) -> None:
        async with item.lock, self._slots:
            if item.gone:
                return
            self._stop(item)
            loop = asyncio.get_running_loop()
            self._counts.reconciles += 1
            generation = item.body["metadata"]["generation"]
            if item.generation != generation:
                item.generation, item.failures, item.until = generation, 0, 0.0
            # A failure that wrote to the status comes back at once as an event: it still has to wait.
            wait: float | None = item.until - loop.time()
            if wait <= 0:
                try:
                    wait = await self._reconcile(item.body)
                    item.failures, item.until = 0, 0.0
                except Exception as error:
                    self._counts.errors += 1
                    wait = min(BACKOFF_BASE * 2 ** min(item.failures, 30), BACKOFF_MAX)
                    item.failures += 1
                    item.until = loop.time() + wait
                    log.warning("%s: %s", item.body["metadata"]["name"], str(error) or repr(error))
            if item.gone:
                return
            if wait is None:
                self._items.pop(uid, None)
            else:
                item.timer = loop.call_later(wait, self._again, uid, item)

    def _again(self, uid: str, item: Item) -> None:
        task = asyncio.create_task(self._run(uid, item))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _stop(item: Item) -> None:
        if item.timer:
            item.timer.cancel()
            item.timer = None


class Api:
    """Writes to the API server."""

    def __init__(self, info: kopf.ConnectionInfo) -> None:
        self._server = info.server
        connector = aiohttp.TCPConnector(ssl=info.as_ssl_context(), limit=0)
        headers = {**info.as_http_headers(), "Content-Type": "application/merge-patch+json"}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(30))

    async def patch(self, resource: str, body: dict[str, Any], patch: dict[str, Any], subresource: str = "") -> None:
        """Merges a patch into an object, or into its subresource."""
        plural, _, group = resource.partition(".")
        meta = body["metadata"]
        url = f"{self._server}/apis/{group}/v1/namespaces/{meta['namespace']}/{plural}/{meta['name']}{subresource}"
        async with self._session.patch(url, data=json.dumps(patch)) as answer:
            content = await answer.json()
            if not answer.ok:
                raise Failure(f"the API server answered {answer.status}: {content.get('message')}")

    async def patch_status(self, resource: str, body: dict[str, Any], status: dict[str, Any]) -> None:
        """The same for the status, unless the object has changed since."""
        version = body["metadata"]["resourceVersion"]
        await self.patch(resource, body, {"metadata": {"resourceVersion": version}, "status": status}, "/status")


class Backend:
    """The mail gateway, or the exporter."""

    def __init__(self, base: str) -> None:
        self._base = base.rstrip("/")
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(30))

    async def send(self, method: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Sends body as JSON; the answer is what a 2xx says."""
        # Not encoded again: the path is escaped already.
        url = URL(self._base + path, encoded=True)
        async with self._session.request(method, url, json=body, headers=headers) as answer:
            content = await answer.read()
            if not 200 <= answer.status < 300:
                raise Failure(f"{url} answered {answer.status}")
            try:
                return json.loads(content) if content else {}
            except ValueError as error:
                raise Failure(f"{url} answered no JSON") from error


def idempotency_key(resource: str, body: dict[str, Any]) -> str:
    """The same for every run of the object, and for no other object."""
    meta = body["metadata"]
    return f"{resource}/{meta['namespace']}/{meta['name']}/{meta['uid']}"


class Mailer:
    """EmailRequest: one object is one mail, sent once through the mail gateway."""

    RESOURCE = "emailrequests.notify.acme.io"

    def __init__(self, api: Api, gateway: Backend) -> None:
        self._api = api
        self._gateway = gateway

    async def reconcile(self, body: dict[str, Any]) -> float | None:
        """Sends the mail unless that is done for this version of the spec."""
        generation = body["metadata"]["generation"]
        if (body.get("status") or {}).get("observedGeneration") == generation:
            return None
        key = f'"{idempotency_key(self.RESOURCE, body)}"'
        await self._gateway.send("POST", "/send", body["spec"], {"Idempotency-Key": key})
        sent = {
            "type": "Sent",
            "status": "True",
            "reason": "Delivered",
            "message": "the gateway has taken the mail",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "observedGeneration": generation,
        }
        await self._api.patch_status(self.RESOURCE, body, {"phase": "Sent", "observedGeneration": generation, "conditions": [sent]})
        return None


class Exporter:
    """ReportJob: one object is one report, exported once its time has come."""

    RESOURCE = "reportjobs.batch.acme.io"

    def __init__(self, api: Api, exporter: Backend) -> None:
        self._api = api
        self._exporter = exporter

    async def reconcile(self, body: dict[str, Any]) -> float | None:
        """Has the report exported unless that is done, or given up, for this version of the spec."""
        generation, status = body["metadata"]["generation"], body.get("status") or {}
        settled = status.get("phase") in ("Done", "Failed")
        if settled and status.get("observedGeneration") == generation:
            return None
        if not_before := body["spec"].get("notBefore"):
            wait = (datetime.fromisoformat(not_before) - datetime.now(UTC)).total_seconds()
            if wait > 0:
                return wait
        try:
            exported = await self._exporter.send("PUT", f"/reports/{quote(idempotency_key(self.RESOURCE, body), safe='')}", body["spec"])
            url = exported.get("url")
            if not url:
                raise Failure("the exporter answered no url")
        except (Failure, aiohttp.ClientError, TimeoutError) as error:
            # The failures of a former version of the spec do not count.
            retries = 1 + (0 if settled else status.get("retries") or 0)
            failed: dict[str, Any] = {"phase": "Pending", "retries": retries, "message": str(error) or repr(error)}
            if retries < ATTEMPTS:
                await self._api.patch_status(self.RESOURCE, body, failed)
                raise
            failed |= {"phase": "Failed", "observedGeneration": generation}
            await self._api.patch_status(self.RESOURCE, body, failed)
            await self._mirror(body, "failed")
            log.warning("%s: given up: %s", body["metadata"]["name"], error)
            return None
        done: dict[str, Any] = {"phase": "Done", "url": url, "observedGeneration": generation}
        # What earlier failures have left.
        if status.get("retries"):
            done["retries"] = 0
        if status.get("message"):
            done["message"] = None
        await self._api.patch_status(self.RESOURCE, body, done)
        await self._mirror(body, "done")
        return None

    async def _mirror(self, body: dict[str, Any], phase: str) -> None:
        await self._api.patch(self.RESOURCE, body, {"metadata": {"labels": {LABEL: phase}}})


async def main() -> None:
    """Runs the operator until the process is told to end."""
    kopf.configure(quiet=True)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    concurrency = int(os.environ.get("CONCURRENCY", "16"))
    counts = Counts()
    await counts.serve(os.environ["COUNT_ADDRESS"])

    info = kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise SystemExit("KUBECONFIG is not set")
    kopf.on.login()(kopf.login_with_kubeconfig)
    api = Api(info)
    for kind in os.environ["KINDS"].split(","):
        match kind.strip():
            case "email":
                mailer = Controller(Mailer(api, Backend(os.environ["GATEWAY"])).reconcile, counts, concurrency)
                kopf.on.event("notify.acme.io", "v1", "emailrequests", id="email")(mailer.on_event)
            case "report":
                exporter = Controller(Exporter(api, Backend(os.environ["EXPORTER"])).reconcile, counts, concurrency)
                kopf.on.event("batch.acme.io", "v1", "reportjobs", id="report")(exporter.on_event)
            case other:
                raise SystemExit(f"KINDS: there is no {other!r} here")
    await kopf.operator(settings=settings, standalone=True, namespaces=[os.environ["WATCH_NAMESPACE"]], ready_flag=counts.ready)


if __name__ == "__main__":
    asyncio.run(main())
