from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=["valkey", "redis-6.2"])
def any_redis(request):
    return request.getfixturevalue("valkey_server" if request.param == "valkey" else "redis62_server")
