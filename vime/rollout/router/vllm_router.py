"""vllm-router in a process of its own: its Rust server holds Python's lock for as long as it runs.

Its settings come as one JSON argument; they hold no secret.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LOOPBACK = "127.0.0.1"


def router_settings(
    workers: list[str], port: int, metrics_port: int, request_timeout: float, startup: float
) -> dict[str, Any]:
    """Arguments of vllm_router's RouterArgs."""
    return {
        "worker_urls": workers,
        "host": LOOPBACK,
        "port": port,
        # It serves metrics whether asked to or not, on port 29000 unless told: two runs of one node would collide.
        "prometheus_host": LOOPBACK,
        "prometheus_port": metrics_port,
        "policy": "round_robin",
        "log_level": "warn",
        "request_timeout_secs": max(1, round(request_timeout)),
        "worker_startup_timeout_secs": max(1, round(startup)),
        "worker_startup_check_interval": 1,
        # The client retries, with a bound and a reason; retries of retries would multiply.
        "disable_retries": True,
        # A breaker would keep a restarted engine out for a minute after it is healthy again.
        "disable_circuit_breaker": True,
        "health_check_interval_secs": 1,
        "health_failure_threshold": 1,
        "health_success_threshold": 1,
        "queue_size": 65536,
        "queue_timeout_secs": max(1, round(request_timeout)),
    }


def main() -> None:
    """Runs the router until it is told to end."""
    from vllm_router.launch_router import launch_router
    from vllm_router.router_args import RouterArgs

    launch_router(RouterArgs(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
