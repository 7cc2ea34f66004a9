"""YAML from a user, read with bounds: a policy.

YAML is larger than it looks. An alias repeats what its anchor names, so ten short lines can stand for billions of
values; an anchor can contain itself; and brackets nest without an end. All of this is noticed while the text is read,
before a value is made of it.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

MAX_DEPTH: Final = 20
MAX_VALUES: Final = 10_000
"""with everything that aliases repeat"""
MAX_NUMBER_CHARS: Final = 100
"""`1:1:1:...` is a number in base 60, which takes the square of its length to read"""

_NO_ALIASES: Final = "write the values out, without anchors (&name) and aliases (*name)"
_NUMBERS: Final = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class YamlOutOfBounds(yaml.MarkedYAMLError):
    """It may be YAML, but a policy written by hand does not look like this; `hint` says what to write instead."""

    def __init__(self, problem: str, hint: str, event: Any) -> None:
        super().__init__(problem=problem, problem_mark=event.start_mark)
        self.hint = hint
        self.line: int = event.start_mark.line + 1


def parse_yaml(text: str) -> Any:
    """The one document in the text, in plain values. Raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, _BoundedLoader)  # a SafeLoader
    except ValueError as broken:  # "2026-02-30" looks like a date
        raise yaml.YAMLError(str(broken)) from broken


class _BoundedLoader(yaml.SafeLoader):
    """Refuses what is too deep or too large, and a key that stands twice: YAML would keep the last and say nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[str, int] = {}
        """by anchor: how many values stand behind it"""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # of a mixin of PyYAML's
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent):
            # The composer itself refuses an alias without an anchor, and two anchors of one name.
            if anchor in self.anchors and anchor not in self._sizes:
                raise YamlOutOfBounds(f"the anchor &{anchor} contains itself", _NO_ALIASES, event)
            self._count(self._sizes.get(anchor, 0), event)
            return super().compose_node(parent, index)
        before = self._values
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise YamlOutOfBounds(f"nested more than {MAX_DEPTH} levels deep", "no setting is nested that deep", event)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._sizes[anchor] = self._values - before
        if isinstance(node, yaml.MappingNode):
            _refuse_twins(node)
        elif isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARS:
            problem = f"a number of more than {MAX_NUMBER_CHARS} characters"
            raise YamlOutOfBounds(problem, "put it in quotes if it is text", event)
        return node  # type: ignore[no-any-return]

    def _count(self, more: int, event: Any) -> None:
        self._values += more
        if self._values > MAX_VALUES:
            problem = f"more than {MAX_VALUES:,} values, with those that aliases repeat"
            raise YamlOutOfBounds(problem, _NO_ALIASES, event)


def _refuse_twins(node: yaml.MappingNode) -> None:
    seen = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in seen:
            raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands there twice", problem_mark=key.start_mark)
        seen.add(key.value)
