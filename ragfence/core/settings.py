"""Where a fence finds its stores and its policy when the caller does not say: the environment and `ragfence.yml`.

The one module of the core that reads anything. It loads pydantic and YAML only when there is a policy to read.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragfence.errors import PolicyError

if TYPE_CHECKING:
    from ragfence.core.policy import Policy

POLICY_FILE = "ragfence.yml"


@dataclass(frozen=True, slots=True)
class Settings:
    """`RAGFENCE_STORE`, `RAGFENCE_OBJECTS`, `RAGFENCE_TENANT` and `RAGFENCE_POLICY`; an empty one is unset."""

    store: str | None = None
    objects: str | None = None
    tenant: str = "default"
    policy: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if environ is None else environ
        given = {name: env.get(f"RAGFENCE_{name.upper()}", "").strip() for name in cls.__slots__}
        return cls(**{name: value for name, value in given.items() if value})


def load_policy(path: str | os.PathLike[str] | None = None) -> Policy:
    """The policy of this file; without one, that of `ragfence.yml` in the working directory, or the defaults."""
    from ragfence.core.policy import Policy

    if path is None and not Path(POLICY_FILE).is_file():
        return Policy()
    file = Path(POLICY_FILE if path is None else path).expanduser()
    try:
        return Policy.from_mapping(_read_yaml(file))
    except PolicyError as refused:
        if "file" in refused.details:
            raise
        raise _refusal(file, refused.message, refused.hint, **refused.details) from refused.__cause__


def _read_yaml(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "correct the path (RAGFENCE_POLICY), or remove it to use the defaults"
        raise _refusal(file, "there is no such policy file", hint) from None
    except (OSError, UnicodeDecodeError) as broken:
        raise _refusal(file, f"cannot be read: {broken}", "a policy is a YAML file in UTF-8") from broken
    try:
        content = _parsed(text)
    except yaml.MarkedYAMLError as broken:
        where = f" at line {broken.problem_mark.line + 1}" if broken.problem_mark else ""
        raise _refusal(file, f"not YAML{where}: {broken.problem}", "correct the file") from broken
    except yaml.YAMLError as broken:
        raise _refusal(file, f"not YAML: {broken}", "correct the file") from broken
    if content is None:  # nothing but comments
        return {}
    if not isinstance(content, Mapping):
        hint = "a policy is a mapping, for example `on_conflict: {status: 409}`"
        raise _refusal(file, f"holds a {type(content).__name__} instead of settings", hint)
    return content


def _parsed(text: str) -> Any:
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """Refuses a key that stands twice: YAML would keep the last one and say nothing."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands there twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    return yaml.load(text, UniqueKeys)


def _refusal(file: Path, problem: str, hint: str, **details: Any) -> PolicyError:
    return PolicyError(f"{file}: {problem}", hint=hint, file=str(file), **details)
