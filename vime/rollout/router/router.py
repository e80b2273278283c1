"""The router role: one address for all engines. Starts vllm-router behind a proxy that asks for the run's token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import aiohttp
from aiohttp import web

from vime.buffer.control import Control
from vime.config import Config
from vime.config.compose import load_resolved
from vime.errors import UserError, WaitTimeout
from vime.rollout.router.proxy import Proxy
from vime.rollout.router.socket_key import lock_ports, new_key
from vime.rollout.router.vllm_router import LOOPBACK, router_settings
from vime.run.directory import RunDir
from vime.run.network import ReservedPort, allow_many_connections, http_url, reserve_port, without_proxy
from vime.run.role import Role, die_with_parent

WATCH_SECONDS = 1.0


async def serve(role: Role, config: Config) -> int:
    """Publishes the router once every engine answers, and serves until asked to stop. Returns the exit code."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    run_dir = RunDir(role.run_dir)
    run_dir.append_event(role, "started")
    timeout = config.cluster.startup_timeout
    control = Control.connect(role, timeout)
    waiting = asyncio.create_task(asyncio.to_thread(_engine_urls, control, config.rollout.engines, timeout))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        os._exit(0)  # the thread above waits in the store, which nothing interrupts
    urls = await waiting
    port, metrics_port = reserve_port(LOOPBACK), reserve_port(LOOPBACK)
    backend = _start_backend(urls, port, metrics_port, config)
    proxy = Proxy(port.url, role.token, config.rollout.request_timeout)
    # Cancel requests whose client disconnected, and those that an engine still works on when the run ends.
    # A connection whose request was refused is closed at once: its body would be read to the end otherwise.
    runner = web.AppRunner(
        proxy.application(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True, lingering_time=0
    )
    await runner.setup()
    try:
        ports = {port.port, metrics_port.port}
        await _wait_ready(proxy, backend, ports, set(urls), timeout)
        site = web.TCPSite(runner, role.host, 0)
        await site.start()
        url = http_url(role.host, runner.addresses[0][1])
        control.publish_router(url)
        run_dir.append_event(role, "ready", url=url, engines=urls, port_locked=proxy.key is not None)
        code = await _watch(proxy, backend, set(urls), stop)
    finally:
        await runner.cleanup()
        _end(backend, config.cluster.stop_timeout * 0.5)
    run_dir.append_event(role, "stopped")
    return code


def _engine_urls(control: Control, engines: int, timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    return [control.engine(index, max(0.001, deadline - time.monotonic())).url for index in range(engines)]


def _start_backend(
    urls: list[str], port: ReservedPort, metrics_port: ReservedPort, config: Config
) -> subprocess.Popen[bytes]:
    settings = router_settings(
        urls, port.port, metrics_port.port, config.rollout.request_timeout, config.cluster.startup_timeout
    )
    environment = without_proxy(os.environ)
    environment.pop("VIME_RUN_TOKEN", None)  # it needs none
    return subprocess.Popen(
        [sys.executable, "-m", "vime.rollout.router.vllm_router", json.dumps(settings)],
        env=environment,
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


async def _wait_ready(
    proxy: Proxy, backend: subprocess.Popen[bytes], ports: set[int], urls: set[str], timeout: float
) -> None:
    """Waits until the router has its engines, and has given its ports a key as soon as it listened."""
    deadline = time.monotonic() + timeout
    key, locked = new_key(), False
    while time.monotonic() < deadline:
        if backend.poll() is not None:
            raise RuntimeError(f"vllm-router ended with {backend.returncode} before it was ready")
        if not locked:
            try:
                locked = lock_ports(backend.pid, key) >= ports
                proxy.key = key
            except OSError as error:
                print(f"the router's port stays open to users of this node: {error}", flush=True)
                locked, proxy.key = True, None
        else:
            try:
                if await proxy.workers() == urls:
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass  # not ready yet
        await asyncio.sleep(0.1)
    raise WaitTimeout(f"waited {timeout:g} s for vllm-router to take on {sorted(urls)}")


async def _watch(proxy: Proxy, backend: subprocess.Popen[bytes], urls: set[str], stop: asyncio.Event) -> int:
    """Waits for the end. Whoever reaches the router can add engines to it: a strange one ends the run."""
    while not stop.is_set():
        if backend.poll() is not None:
            print(f"vllm-router ended with {backend.returncode}", flush=True)
            return backend.returncode if backend.returncode > 0 else 128 - backend.returncode
        try:
            strange = await proxy.workers() ^ urls
        except (aiohttp.ClientError, TimeoutError):
            strange = set()  # busy; if it is dead, poll() says so
        if strange:
            print(f"the router's engines were changed from outside: {sorted(strange)}", flush=True)
            return 1
        try:
            await asyncio.wait_for(stop.wait(), WATCH_SECONDS)
        except TimeoutError:
            continue
    return 0


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def main() -> int:
    """Entry point of the role."""
    die_with_parent()
    role = Role.from_environment()
    allow_many_connections()  # vllm-router inherits it
    try:
        return asyncio.run(serve(role, load_resolved(RunDir(role.run_dir).config)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
