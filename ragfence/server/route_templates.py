"""Which template a request will be matched to (`/refunds/{id}`), found before the router has run.

Starlette's routes tell; FastAPI keeps included routers as branches, which are looked into. What cannot be found is
scoped by its path, which is safe: the same key on two paths is then two operations instead of a conflict. Where routes
are of one host (`Host`), the host that was asked is a part of it: the same path on another one is another operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from ragfence.server.asgi import Scope

_PORT: Final = re.compile(r":\d*$")


def path_in(scope: Scope) -> str:
    """As the application knows it: without the prefix under which it is mounted."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def template_of(scope: Scope) -> str:
    """With the prefix of every mount, and the host where it decides. Empty if there is none."""
    routes = getattr(scope.get("app"), "routes", None)
    return _found(routes, scope, "") if routes else ""


def _found(routes: Iterable[Any], scope: Scope, prefix: str) -> str:
    from starlette.routing import Host, Match

    for route in routes:
        branches = getattr(route, "effective_candidates", None)
        if callable(branches):
            if inner := _found(branches(), scope, prefix):
                return inner
            continue
        try:
            match, child = route.matches(scope)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # a route of some other make
        if match is not Match.FULL:
            continue
        if isinstance(route, Host):
            # As it was asked, since `{team}.example` is another host for every team.
            here = f"{prefix}//{_host_in(scope)}"
            return _found(route.routes, {**scope, **child}, here) or here + path_in(scope)
        here = prefix + str(getattr(getattr(route, "starlette_route", None) or route, "path", ""))
        below = getattr(route, "routes", None)
        # A mount: what is mounted knows the rest.
        return _found(below, {**scope, **child}, here) or here if below else here
    return ""


def _host_in(scope: Scope) -> str:
    told = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return _PORT.sub("", told.decode("latin-1").lower())
