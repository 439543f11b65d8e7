"""Settings of the whole suite: property tests repeat, and a busy machine does not fail them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from redis_server import own_redis, redis_program, redis_server  # noqa: F401 - fixtures for every folder

settings.register_profile(
    "steady",
    deadline=None,
    derandomize="HEADRACE_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")
