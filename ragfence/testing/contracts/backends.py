"""What every `Backend` must do, as tests. A backend of your own proves itself with a few lines:

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def reopen(self, tmp_path):
            yield lambda: MyBackend(tmp_path)       # each call another handle on the same, empty place

Call `pytest.register_assert_rewrite("ragfence.testing.contracts.backends")` in your conftest for readable failures.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, get_args

import pytest

from ragfence.errors import BuildMissing, ValidationError
from ragfence.indexes.backends.backend import (
    PAYLOAD,
    PREFIX,
    Backend,
    BatchSearch,
    Metric,
    Pointer,
    Shape,
    row_schema,
)

DIMENSION = 8
METRICS: tuple[Metric, ...] = get_args(Metric)
ODD_TEXTS = (
    *(
        "it's",
        'a "quote"',
        "back\\slash",
        "per%cent_under",
        "';--",
        "'' OR '1'='1",
        "日本語",
        "🦊 ключ",
        "á",
        "a\u0301",
    ),
    *("line\nbreak", "tab\t", "null", "", " ", "{}", "$1", "`x`", "a/b?c=d&e"),
)


def rows(count: int, *, first: int = 0, dimension: int = DIMENSION, documents: int = 5, seed: int = 1) -> Any:
    """An Arrow table of made-up rows; number n is of document n % documents."""
    import numpy as np
    import pyarrow as pa

    numbers = range(first, first + count)
    vectors = np.random.default_rng((seed, first)).normal(size=(count, dimension)).astype(np.float32)
    values: dict[str, Any] = {
        "snippet_id": [f"{number:032x}" for number in numbers],
        "doc_id": [f"doc-{number % documents}" for number in numbers],
        "section_id": [f"section {number % 3}" for number in numbers],
        "ordinal": list(numbers),
        "start": [number * 10 for number in numbers],
        "end": [number * 10 + 9 for number in numbers],
        "tokens": [number % 7 for number in numbers],
        "text": [f"the text of row {number}" for number in numbers],
        "source_url": [f"https://example.org/{number}" for number in numbers],
        "metadata": [f'{{"number":{number}}}' for number in numbers],
        "vector": list(vectors),
    }
    schema = row_schema(dimension)
    return pa.table([pa.array(values[field.name], field.type) for field in schema], schema=schema)


def vectors_of(table: Any, dimension: int = DIMENSION) -> Any:
    import numpy as np

    flat = np.asarray(table.column("vector").combine_chunks().flatten(), dtype=np.float32)
    return flat.reshape(-1, dimension)


def nearness(metric: Metric, vectors: Any, query: Any) -> Any:
    """Of every row, as `Found.score` says it."""
    import numpy as np

    wide, asked = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return -((wide - asked) ** 2).sum(axis=1)
    dots = wide @ asked
    return dots / (np.linalg.norm(wide, axis=1) * np.linalg.norm(asked)) if metric == "cosine" else dots


def read_all(backend: Backend, physical: str, columns: list[str] | None = None) -> Any:
    import pyarrow as pa

    tables = list(backend.read(physical, columns))
    return pa.concat_tables(tables) if tables else None


class BackendContract:
    fences_pointer: ClassVar[bool] = True
    """whether an older generation is refused"""
    many: ClassVar[int] = 3_000
    """rows, a multiple of 30"""
    lasting: ClassVar[int] = 12
    """rounds of writing and dropping while others search"""
    several_handles: ClassVar[bool] = True
    """False: a place can be opened once at a time"""

    @pytest.fixture
    def reopen(self) -> Iterator[Callable[[], Backend]]:
        raise NotImplementedError("override the fixture `reopen` in the subclass")

    @pytest.fixture
    def backend(self, reopen: Callable[[], Backend]) -> Iterator[Backend]:
        backend = reopen()
        yield backend
        backend.close()

    def test_what_was_written_is_read_back_with_all_columns(self, backend: Backend) -> None:
        table = rows(self.many)
        assert backend.write("rf-a", Shape(DIMENSION, "dot"), _pieces(table, 700)) == self.many
        backend.finish("rf-a", Shape(DIMENSION, "dot"))
        assert backend.count("rf-a") == self.many
        found = read_all(backend, "rf-a").sort_by("snippet_id")
        assert found.schema == row_schema(DIMENSION)
        assert found.equals(table)

    def test_cosine_vectors_come_back_equal_but_for_their_length(self, backend: Backend) -> None:
        import numpy as np

        table = rows(50)
        backend.write("rf-a", Shape(DIMENSION, "cosine"), [table])
        back = vectors_of(read_all(backend, "rf-a").sort_by("snippet_id"))
        unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (vectors_of(table), back)]
        assert np.abs(unit[0] - unit[1]).max() < 1e-6

    def test_only_the_columns_that_are_asked_for_are_read(self, backend: Backend) -> None:
        table = rows(20)
        backend.write("rf-a", Shape(DIMENSION, "l2"), [table])
        found = read_all(backend, "rf-a", ["snippet_id", "ordinal"])
        assert found.column_names == ["snippet_id", "ordinal"]
        assert found.sort_by("snippet_id").equals(table.select(["snippet_id", "ordinal"]))
        assert read_all(backend, "rf-a", ["vector"]).column_names == ["vector"]
        with pytest.raises(ValidationError):
            read_all(backend, "rf-a", ["snippet_id", "nothing"])

    def test_a_name_is_written_once(self, backend: Backend) -> None:
        backend.write("rf-a", Shape(DIMENSION), [rows(3)])
        with pytest.raises(ValidationError):
            backend.write("rf-a", Shape(DIMENSION), [rows(5)])
        assert backend.count("rf-a") == 3

    def test_a_name_of_full_length_is_fine(self, backend: Backend) -> None:
        name = f"{PREFIX}{'0123456789abcdef' * 4}-{'ABCdef-9' * 4}"
        backend.write(name, Shape(DIMENSION), [rows(3)])
        assert backend.exists(name)
        assert backend.physicals() == [name]

    def test_rows_are_pulled_while_they_are_written(self, backend: Backend) -> None:
        """Of the tables that are made, few are alive at once."""
        alive, most = 0, 0

        class ContractPiece:
            def __init__(self) -> None:
                nonlocal alive, most
                alive += 1
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= 1

        def pieces() -> Iterator[Any]:
            for number in range(self.many // 30):
                piece = ContractPiece()
                yield rows(30, first=number * 30)
                del piece

        assert backend.write("rf-a", Shape(DIMENSION), pieces()) == self.many
        assert most < self.many // 30 // 2

    def test_an_error_of_the_rows_comes_through_as_it_is(self, backend: Backend) -> None:
        class OfTheCaller(Exception):
            pass

        def pieces() -> Iterator[Any]:
            yield rows(50)
            raise OfTheCaller("stop")

        with pytest.raises(OfTheCaller):
            backend.write("rf-a", Shape(DIMENSION), pieces())
        backend.drop("rf-a")
        assert not backend.exists("rf-a")

    def test_rows_may_come_from_another_index_of_the_backend(self, backend: Backend) -> None:
        table = rows(self.many)
        backend.write("rf-a", Shape(DIMENSION, "l2"), [table])
        backend.write("rf-b", Shape(DIMENSION, "l2"), backend.read("rf-a"))
        assert read_all(backend, "rf-b").sort_by("snippet_id").equals(table)

    def test_an_index_without_rows_is_an_index(self, backend: Backend) -> None:
        import numpy as np

        for name, tables in (("rf-none", []), ("rf-empty", [rows(0)])):
            assert backend.write(name, Shape(DIMENSION), tables) == 0
            backend.finish(name, Shape(DIMENSION))
            assert backend.exists(name)
            assert backend.count(name) == 0
            assert list(backend.read(name)) == []
            assert backend.search(name, np.ones(DIMENSION, np.float32), 5) == []
            backend.remove(name, ["doc-1"])

    @pytest.mark.parametrize("metric", METRICS)
    def test_a_search_finds_what_comparing_with_every_row_finds(self, backend: Backend, metric: Metric) -> None:
        import numpy as np

        table = rows(400)
        backend.write("rf-a", Shape(DIMENSION, metric), _pieces(table, 150))
        backend.finish("rf-a", Shape(DIMENSION, metric))
        for query in vectors_of(rows(3, seed=9)):
            scores = nearness(metric, vectors_of(table), query)
            nearest = np.argsort(-scores)[:12]
            found = backend.search("rf-a", query, 12)
            assert [each.ordinal for each in found] == nearest.tolist()
            assert np.abs(np.array([each.score for each in found]) - scores[nearest]).max() < 1e-4
            first = table.slice(int(nearest[0]), 1).to_pylist()[0]
            assert found[0][:-1] == tuple(first[name] for name in PAYLOAD)

    @pytest.mark.parametrize("metric", METRICS)
    def test_many_searches_in_one_call_find_what_each_finds_alone(self, backend: Backend, metric: Metric) -> None:
        """Optional: a backend without `search_many` is searched once for each vector."""
        import numpy as np

        if not isinstance(backend, BatchSearch):
            pytest.skip("has no search_many")
        backend.write("rf-a", Shape(DIMENSION, metric), _pieces(rows(400), 150))
        backend.finish("rf-a", Shape(DIMENSION, metric))
        for count in (0, 1, 7):
            vectors = vectors_of(rows(count, seed=9))
            found = backend.search_many("rf-a", vectors, 12)
            alone = [backend.search("rf-a", vector, 12) for vector in vectors]
            assert [[each.snippet_id for each in nearest] for nearest in found] == [
                [each.snippet_id for each in nearest] for nearest in alone
            ]
            for nearest, same in zip(found, alone, strict=True):
                assert [each.score for each in nearest] == pytest.approx([each.score for each in same], abs=1e-4)
        with pytest.raises(ValidationError):
            backend.search_many("rf-a", np.ones((2, DIMENSION + 1), np.float32), 3)
        with pytest.raises(BuildMissing):
            backend.search_many("rf-b", np.ones((2, DIMENSION), np.float32), 3)

    def test_more_may_be_asked_for_than_there_are(self, backend: Backend) -> None:
        backend.write("rf-a", Shape(DIMENSION), [rows(30)])
        assert len(backend.search("rf-a", vectors_of(rows(1))[0], 10_000)) == 30

    def test_a_search_that_makes_no_sense_is_refused(self, backend: Backend) -> None:
        import numpy as np

        backend.write("rf-a", Shape(DIMENSION), [rows(3)])
        for vector, k in ((np.ones(DIMENSION + 1, np.float32), 3), (np.ones(DIMENSION, np.float32), 0)):
            with pytest.raises(ValidationError):
                backend.search("rf-a", vector, k)

    def test_a_query_of_length_0_is_near_to_nothing_by_cosine_alone(self, backend: Backend) -> None:
        import numpy as np

        for metric in METRICS:
            backend.write(f"rf-{metric}", Shape(DIMENSION, metric), [rows(3)])
        for metric in ("dot", "l2"):
            assert len(backend.search(f"rf-{metric}", np.zeros(DIMENSION, np.float32), 3)) == 3
        with pytest.raises(ValidationError):
            backend.search("rf-cosine", np.zeros(DIMENSION, np.float32), 3)

    def test_a_shape_that_cannot_be_is_refused_before_anything_is_made(self, backend: Backend) -> None:
        wrong: tuple[Shape, ...] = (
            Shape(0),
            Shape(DIMENSION, "manhattan"),  # type: ignore[arg-type]
            Shape(DIMENSION, index="no-such-index"),
            Shape(DIMENSION, parameters={"no_such_parameter": 1}),
        )
        for shape in wrong:
            with pytest.raises(ValidationError):
                backend.check(shape)
            with pytest.raises(ValidationError):
                backend.write("rf-a", shape, [rows(3)])
        assert not backend.exists("rf-a")

    def test_the_approximate_index_for_so_many_rows_is_one_that_it_has(self, backend: Backend) -> None:
        for rows in (0, 1, 257, 1_000_000):
            for dimension in (1, 7, 256):
                made = backend.approximate(rows, dimension)
                assert made == backend.approximate(rows, dimension)
                if made is not None:
                    assert made[0] != "flat"
                    backend.check(Shape(dimension, "cosine", *made))

    def test_removed_documents_are_gone_and_all_others_stay(self, backend: Backend) -> None:
        table = rows(100)
        backend.write("rf-a", Shape(DIMENSION, "l2"), [table])
        backend.finish("rf-a", Shape(DIMENSION, "l2"))
        backend.remove("rf-a", ["doc-1", "doc-3", "never seen"])
        assert backend.count("rf-a") == 60
        left = read_all(backend, "rf-a").sort_by("snippet_id")
        assert set(left.column("doc_id").to_pylist()) == {"doc-0", "doc-2", "doc-4"}
        assert left.slice(0, 2).equals(table.take([0, 2]))
        assert {each.doc_id for each in backend.search("rf-a", vectors_of(table)[1], 100)} == {
            "doc-0",
            "doc-2",
            "doc-4",
        }
        backend.remove("rf-a", ["doc-1"])
        backend.remove("rf-a", ["doc-0", "doc-2", "doc-4"])
        assert backend.count("rf-a") == 0
        assert backend.search("rf-a", vectors_of(table)[1], 100) == []

    def test_odd_text_is_kept_and_removed_as_it_is(self, backend: Backend) -> None:
        import pyarrow as pa

        table = rows(len(ODD_TEXTS))
        for name in ("doc_id", "section_id", "text", "source_url", "metadata"):
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(ODD_TEXTS, pa.string()))
        backend.write("rf-a", Shape(DIMENSION, "l2"), [table])
        assert read_all(backend, "rf-a").sort_by("snippet_id").equals(table)
        left = set(ODD_TEXTS)
        for doc_id in random.Random(5).sample(ODD_TEXTS, 6):
            backend.remove("rf-a", [doc_id])
            left.remove(doc_id)
            assert set(read_all(backend, "rf-a", ["doc_id"]).column("doc_id").to_pylist()) == left

    def test_what_is_missing_is_said_to_be_missing(self, backend: Backend) -> None:
        import numpy as np

        backend.write("rf-dropped", Shape(DIMENSION), [rows(3)])
        backend.drop("rf-dropped")
        for name in ("rf-never", "rf-dropped"):
            assert not backend.exists(name)
            for act in (
                lambda name=name: backend.count(name),
                lambda name=name: list(backend.read(name)),
                lambda name=name: backend.search(name, np.ones(DIMENSION, np.float32), 3),
                lambda name=name: backend.remove(name, ["doc-1"]),
            ):
                with pytest.raises(BuildMissing):
                    act()
            backend.drop(name)

    def test_physicals_are_those_with_our_prefix(self, backend: Backend) -> None:
        assert backend.physicals() == []
        names = [f"rf-{number:02}" for number in range(14)]
        for name in (*names, "of-somebody-else"):
            backend.write(name, Shape(DIMENSION), [rows(1)])
        backend.point("docs", names[0], 1)
        assert sorted(backend.physicals()) == names
        for name in names[3:]:
            backend.drop(name)
        assert sorted(backend.physicals()) == names[:3], "a dropped index is not listed, not even for a while"

    def test_a_pointer_is_set_moved_and_deleted(self, backend: Backend) -> None:
        for name in ("rf-a", "rf-b"):
            backend.write(name, Shape(DIMENSION), [rows(1)])
        assert backend.pointer("docs") is None
        backend.unpoint("docs")
        backend.point("docs", "rf-a", 1)
        backend.point("it's", "rf-a", 1)
        backend.point("docs", "rf-b", 2)
        assert backend.pointer("docs") == Pointer("rf-b", 2 if self.fences_pointer else None)
        assert backend.pointer("it's") == Pointer("rf-a", 1 if self.fences_pointer else None)
        backend.unpoint("docs")
        assert backend.pointer("docs") is None
        assert backend.pointer("it's") is not None

    def test_an_older_generation_does_not_move_a_pointer_back(self, backend: Backend) -> None:
        if not self.fences_pointer:
            pytest.skip("this backend's aliases have no generation")
        backend.write("rf-a", Shape(DIMENSION), [rows(1)])
        backend.write("rf-b", Shape(DIMENSION), [rows(1)])
        backend.point("docs", "rf-b", 7)
        backend.point("docs", "rf-a", 6)
        assert backend.pointer("docs") == Pointer("rf-b", 7)
        backend.point("docs", "rf-a", 7)
        assert backend.pointer("docs") == Pointer("rf-a", 7)

    def test_of_many_who_point_at_once_the_newest_generation_stays(self, backend: Backend) -> None:
        if not self.fences_pointer:
            pytest.skip("this backend's aliases have no generation")
        start = threading.Barrier(8)

        def point(alias: str, generation: int) -> None:
            start.wait()
            backend.point(alias, f"rf-{generation}", generation)

        with ThreadPoolExecutor(8) as pool:
            for round_ in range(3):
                generations = random.Random(round_).sample(range(1, 9), 8)
                list(pool.map(point, [f"docs-{round_}"] * 8, generations))
                assert backend.pointer(f"docs-{round_}") == Pointer("rf-8", 8)

    def test_searches_go_on_while_other_indexes_come_and_go(self, backend: Backend) -> None:
        table = rows(200)
        backend.write("rf-a", Shape(DIMENSION), [table])
        query = vectors_of(table)[7]
        expected = [each.snippet_id for each in backend.search("rf-a", query, 5)]
        done = threading.Event()

        def search() -> int:
            count = 0
            while not done.is_set() or not count:
                assert [each.snippet_id for each in backend.search("rf-a", query, 5)] == expected
                assert "rf-a" in backend.physicals()
                count += 1
            return count

        with ThreadPoolExecutor(3) as pool:
            searching = [pool.submit(search) for _ in range(3)]
            try:
                for number in range(self.lasting):
                    backend.write(f"rf-other-{number}", Shape(DIMENSION), [rows(100, first=number)])
                    assert backend.count(f"rf-other-{number}") == 100
                    backend.drop(f"rf-other-{number}")
            finally:
                done.set()
            assert all(each.result() for each in searching)

    def test_another_handle_sees_the_same(self, reopen: Callable[[], Backend]) -> None:
        table = rows(50)
        first = reopen()
        first.write("rf-a", Shape(DIMENSION, "dot"), [table])
        first.finish("rf-a", Shape(DIMENSION, "dot"))
        first.point("docs", "rf-a", 3)
        found = first.search("rf-a", vectors_of(table)[0], 5)
        if not self.several_handles:
            first.close()
        second = reopen()
        try:
            assert second.physicals() == ["rf-a"]
            assert second.search("rf-a", vectors_of(table)[0], 5) == found
            assert read_all(second, "rf-a").sort_by("snippet_id").equals(table)
            pointed = second.pointer("docs")
            assert pointed is not None
            assert pointed.physical == "rf-a"
            if self.several_handles:
                second.remove("rf-a", ["doc-0"])
                assert "doc-0" not in {each.doc_id for each in first.search("rf-a", vectors_of(table)[0], 50)}
                second.drop("rf-a")
                with pytest.raises(BuildMissing):
                    first.search("rf-a", vectors_of(table)[0], 5)
        finally:
            first.close()
            second.close()

    def test_the_url_is_for_people(self, backend: Backend) -> None:
        assert backend.name in backend.url
        assert "@" not in backend.url


def _pieces(table: Any, size: int) -> Iterator[Any]:
    for at in range(0, table.num_rows, size):
        yield table.slice(at, size)
