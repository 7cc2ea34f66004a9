"""Chunkers: pieces that are parts of the text, sizes that are kept, cuts that survive edits, and recipes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragfence.core.canonical import JsonValue, parse_json
from ragfence.core.document import normalised
from ragfence.documents.chunking.boundaries import LINE, PARAGRAPH, Border, Span, cut
from ragfence.documents.chunking.chunker import Chunker, MarkdownChunker, Piece, Recipe, TextChunker, pieces_of
from ragfence.errors import ValidationError

CHUNKERS: tuple[type[TextChunker] | type[MarkdownChunker], ...] = (TextChunker, MarkdownChunker)
WORDS = (
    *("lease", "fence", "token", "shard", "epoch", "store", "commit", "seal", "receipt", "index", "build", "alias"),
    *("snippet", "source", "writer", "reader", "clock", "batch", "stream", "object", "policy", "tenant", "digest"),
    *("anchor", "border", "quick", "brown", "lazy", "river", "mountain", "budget", "invoice", "customer", "network"),
)

both = pytest.mark.parametrize("kind", CHUNKERS)
often = settings(max_examples=200, deadline=None)


def snippets(chunker: Chunker, text: str) -> list[str]:
    return [text[start:end] for start, end, _ in pieces_of(chunker, text, "doc")]


def sentence(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(5, 18))).capitalize() + "."


def paragraph(dice: random.Random, fewest: int = 2, most: int = 8) -> str:
    return " ".join(sentence(dice) for _ in range(dice.randint(fewest, most)))


def plain_blocks(dice: random.Random, count: int) -> list[str]:
    return [paragraph(dice) for _ in range(count)]


def markdown_blocks(dice: random.Random, count: int) -> list[str]:
    """A manual: headings, paragraphs, lists, code, tables, quotes."""
    blocks = ["# Manual"]
    while len(blocks) < count:
        if dice.random() < 0.15:
            blocks.append(f"{'#' * dice.randint(2, 4)} {' '.join(dice.choices(WORDS, k=3)).title()}")
        blocks.append(paragraph(dice))
        match dice.randrange(12):
            case 0:
                blocks.append("\n".join(f"- {sentence(dice)}" for _ in range(dice.randint(2, 7))))
            case 1:
                lines = [
                    f"{word} = {dice.randint(1, 99)}  # set" for word in dice.choices(WORDS, k=dice.randint(2, 12))
                ]
                blocks.append("\n".join(("```python", *lines, "", "# done", "```")))
            case 2:
                rows = [f"| {one} | {dice.randint(1, 99)} |" for one in dice.choices(WORDS, k=dice.randint(2, 8))]
                blocks.append("\n".join(("| name | value |", "|---|---|", *rows)))
            case 3:
                blocks.append(f"> {paragraph(dice, 1, 3)}")
    return blocks


class Sample(NamedTuple):
    chunker: Chunker
    blocks: list[str]

    @classmethod
    def of(cls, kind: type[TextChunker] | type[MarkdownChunker], seed: int) -> Sample:
        """A document of 100 to 150 snippets."""
        make = plain_blocks if kind is TextChunker else markdown_blocks
        return cls(kind(), make(random.Random(seed), 230))

    def snippets(self, blocks: Sequence[str]) -> list[str]:
        return snippets(self.chunker, "\n\n".join(blocks))


def shorter(blocks: list[str], at: int, dice: random.Random) -> list[str]:
    return [*blocks[:at], sentence(dice), *blocks[at + 1 :]]


def longer(blocks: list[str], at: int, dice: random.Random) -> list[str]:
    return [*blocks[:at], f"{sentence(dice)} {blocks[at]} {sentence(dice)}", *blocks[at + 1 :]]


def inserted(blocks: list[str], at: int, dice: random.Random) -> list[str]:
    return [*blocks[:at], paragraph(dice), *blocks[at:]]


def removed(blocks: list[str], at: int, dice: random.Random) -> list[str]:
    return [*blocks[:at], *blocks[at + 1 :]]


@both
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("edit", [shorter, longer, inserted, removed])
def test_one_changed_paragraph_near_the_top_makes_at_most_three_new_snippets(
    kind: type[TextChunker] | type[MarkdownChunker],
    edit: Callable[[list[str], int, random.Random], list[str]],
    seed: int,
) -> None:
    sample, dice = Sample.of(kind, seed), random.Random(seed + 1000)
    near_top = [at for at, block in enumerate(sample.blocks[:16]) if block[0].isalpha()][1:]
    edited = edit(sample.blocks, dice.choice(near_top), dice)
    before, after = sample.snippets(sample.blocks), sample.snippets(edited)
    assert len(before) >= 100
    assert after != before
    new = Counter(after) - Counter(before)
    assert new.total() <= 3, list(new)


@both
def test_edits_anywhere_make_few_new_snippets(kind: type[TextChunker] | type[MarkdownChunker]) -> None:
    """Over many edits of all kinds: one or two new snippets are usual, more than three are one edit in a hundred."""
    told: list[int] = []
    for seed in range(3):
        sample, dice = Sample.of(kind, seed), random.Random(seed)
        before = Counter(sample.snippets(sample.blocks))
        for edit in (shorter, longer, inserted, removed):
            for _ in range(25):
                at = dice.choice([at for at, block in enumerate(sample.blocks) if block[0].isalpha()])
                told.append((Counter(sample.snippets(edit(sample.blocks, at, dice))) - before).total())
    assert mean(told) < 1.6
    assert sum(new > 3 for new in told) <= len(told) // 100


@both
def test_equal_paragraphs_in_a_row_do_not_shift_each_other(kind: type[TextChunker] | type[MarkdownChunker]) -> None:
    """Packing would never come back into step here: all paragraphs have the same size."""
    blocks = [f"{number:04} {'word ' * 60}".strip() for number in range(300)]
    before = Counter(snippets(kind(), "\n\n".join(blocks)))
    for at in range(5, 25):
        after = snippets(kind(), "\n\n".join([*blocks[:at], "A new one. " * 20, *blocks[at:]]))
        assert (Counter(after) - before).total() <= 3


def test_an_edit_of_a_text_without_paragraphs_stays_where_it_is() -> None:
    """Lines and sentences are borders where there is nothing better."""
    dice = random.Random(7)
    for joint, most in (("\n", 3), (" ", 12)):
        sentences = [sentence(dice) for _ in range(1000)]
        before = snippets(TextChunker(), joint.join(sentences))
        after = snippets(TextChunker(), joint.join([*sentences[:20], "A new one.", *sentences[20:]]))
        assert len(before) > 75
        assert 0 < (Counter(after) - Counter(before)).total() <= most


@both
@pytest.mark.parametrize("size", [100, 400, 1000])
def test_pieces_are_of_a_reasonable_size(kind: type[TextChunker] | type[MarkdownChunker], size: int) -> None:
    make = plain_blocks if kind is TextChunker else markdown_blocks
    sizes = [len(each) for each in snippets(kind(size=size), "\n\n".join(make(random.Random(1), 300)))]
    assert max(sizes) <= size
    assert 0.55 * size < mean(sizes) < 0.8 * size
    assert sum(each < size // 5 for each in sizes) < len(sizes) / 5


@both
def test_paragraphs_that_fit_are_never_cut(kind: type[TextChunker] | type[MarkdownChunker]) -> None:
    """But where a scrap of less than a tenth of the size would be left."""
    made = plain_blocks(random.Random(3), 300)
    blocks = [block.replace(". ", ".\n") for block in made if 100 <= len(block) <= 1000]
    for snippet in snippets(kind(), "\n\n".join(blocks)):
        assert set(snippet.split("\n\n")) <= set(blocks)


def test_markdown_is_cut_at_headings_first() -> None:
    text = "\n\n".join(f"## Part {number}\n\n{'One. ' * 80}\n\n{'Two. ' * 80}" for number in range(8))
    found = pieces_of(MarkdownChunker(), text, "doc")
    assert [text[start:end].partition("\n")[0] for start, end, _ in found] == [f"## Part {at}" for at in range(8)]
    assert [section for _, _, section in found] == [f"Part {at}" for at in range(8)]


def test_a_heading_is_never_left_alone() -> None:
    for snippet in snippets(MarkdownChunker(size=300), "\n\n".join(markdown_blocks(random.Random(5), 400))):
        assert not snippet.splitlines()[-1].startswith("##")


def test_pieces_know_the_section_they_start_in() -> None:
    text = f"Intro.\n\n# Guide\n\n{'One. ' * 250}\n\n## Install\n\n{'Two. ' * 250}\n\nUse\n===\n\nThree."
    found = pieces_of(MarkdownChunker(), text, "doc")
    assert [(text[start : start + 4], section) for start, _, section in found] == [
        ("Intr", ""),
        ("# Gu", "Guide"),
        ("One.", "Guide"),
        ("## I", "Guide/Install"),
        ("Two.", "Guide/Install"),
        ("Use\n", "Use"),
    ]
    assert {section for _, _, section in pieces_of(TextChunker(), text, "doc")} == {""}


def test_code_keeps_the_indentation_of_its_first_line() -> None:
    code = "\n".join(f"    line_{number} = {'x' * 50}" for number in range(40))
    for snippet in snippets(MarkdownChunker(), f"Text.\n\n{code}")[1:]:
        assert snippet.startswith("    line_")


def test_a_text_that_fits_is_one_piece_without_the_blanks_around_it() -> None:
    assert TextChunker().split(" \n text\nmore \n\n") == [Piece(3, 12)]
    assert MarkdownChunker().split("\n\n  # A\ntext\n") == [Piece(2, 12, "A")]
    assert TextChunker(size=4).split("abcd\n") == [Piece(0, 4)]


@both
@pytest.mark.parametrize("text", ["", " ", "\n\n\n", "\t \u3000\u2028", "\x1c\x1f", " " * 5000, "\n" * 5000])
def test_a_text_of_nothing_but_blanks_has_no_pieces(kind: type[TextChunker] | type[MarkdownChunker], text: str) -> None:
    assert pieces_of(kind(), text, "doc") == []


scripts = st.text(
    st.sampled_from(
        "ab .,!?\n\n\t#-`*_[]()|>éüß漢字。かな한글שלוםعربي؟हिन्दी।👍👩🏽‍💻🇩🇪"
        "e\u0301\u0323\u200d\ufe0f\u202e\u00a0\u2028\x0b\x1c"
    ),
    max_size=400,
)
texts = scripts | st.lists(scripts | st.sampled_from(["# a", "```", "- x", "word " * 30, "x" * 300]), max_size=9).map(
    "\n".join
)
sizes = st.tuples(st.integers(1, 90), st.integers(0, 60)).filter(lambda pair: pair[1] < pair[0])


@both
@often
@given(text=texts, sized=sizes)
@example(text="a" * 1000, sized=(7, 3))
@example(text="👩🏽‍💻" * 99, sized=(5, 4))
@example(text="one two " * 99, sized=(30, 29))
@example(text="    \n" * 99 + "x", sized=(3, 1))
def test_pieces_are_parts_of_the_text_and_miss_nothing_but_blanks(
    kind: type[TextChunker] | type[MarkdownChunker], text: str, sized: tuple[int, int]
) -> None:
    """In order, not empty, of at most `size` characters; all that is no blank is in one; the same again."""
    text = normalised(text.replace("\x00", ""))
    chunker = kind(*sized)
    found = pieces_of(chunker, text, "doc")
    covered: set[int] = set()
    for start, end, section in found:
        assert 0 <= start < end <= len(text)
        assert end - start <= chunker.size
        assert not text[start:end].isspace()
        assert kind is MarkdownChunker or section == ""
        covered.update(range(start, end))
    assert [piece.start for piece in found] == sorted(piece.start for piece in found)
    assert [piece.end for piece in found] == sorted({piece.end for piece in found})
    assert all(mark.isspace() for at, mark in enumerate(text) if at not in covered)
    assert pieces_of(kind(*sized), text, "doc") == found


@both
def test_offsets_count_characters_also_where_lines_are_split(kind: type[TextChunker] | type[MarkdownChunker]) -> None:
    text = "Ein längerer Satz — 👩🏽‍💻 mit שלום und e\u0301. " * 300
    found = pieces_of(kind(size=200), text, "doc")
    assert len(found) > 60
    for start, end, _ in found:
        assert text[start:end] == text[start:end].strip()
        assert text[start] not in "\u0301\u200d"
        assert start == 0 or text[start - 1] == " "


@both
def test_pieces_reach_back_as_far_as_the_overlap_allows(kind: type[TextChunker] | type[MarkdownChunker]) -> None:
    text = "\n\n".join(plain_blocks(random.Random(2), 60))
    found = pieces_of(kind(size=800, overlap=200), text, "doc")
    reach = [before.end - piece.start for before, piece in pairwise(found)]
    assert max(reach) <= 200
    assert mean(reach) > 100
    assert max(piece.end - piece.start for piece in found) <= 800
    for piece in found[1:]:
        assert text[piece.start - 1] in " \n"
        assert text[piece.start].isupper()  # a sentence starts here


def test_no_piece_reaches_back_over_a_heading() -> None:
    text = "\n\n".join(markdown_blocks(random.Random(2), 200))
    bare = pieces_of(MarkdownChunker(size=500), text, "doc")
    headings = [text[piece.start] == "#" for piece in bare]
    assert sum(headings) > 15
    found = pieces_of(MarkdownChunker(size=700, overlap=200), text, "doc")
    assert len(found) == len(bare)
    for piece, own, heading in zip(found, bare, headings, strict=True):
        assert (piece.end, piece.section_id) == (own.end, own.section_id)
        assert own.start - 200 <= piece.start <= own.start
        assert piece.start == own.start or not heading


def test_edits_of_overlapping_pieces_make_few_new_ones() -> None:
    blocks = plain_blocks(random.Random(1), 150)
    chunker = TextChunker(overlap=100)
    before = Counter(snippets(chunker, "\n\n".join(blocks)))
    for at in range(2, 12):
        edited = [*blocks[:at], "A changed paragraph.", *blocks[at + 1 :]]
        assert 0 < (Counter(snippets(chunker, "\n\n".join(edited))) - before).total() <= 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": 0}, "size must be from 1"),
        ({"size": -1}, "size must be from 1"),
        ({"size": 2**24 + 1}, "size must be from 1"),
        ({"size": "1000"}, "size must be an integer, got str"),
        ({"size": True}, "size must be an integer, got bool"),
        ({"overlap": -1}, "overlap must be from 0"),
        ({"overlap": 1000}, "overlap must be from 0 to below the size of 1000"),
        ({"overlap": 0.1}, "overlap must be an integer, got float"),
    ],
)
@both
def test_sizes_that_make_no_sense_are_refused(
    kind: type[TextChunker] | type[MarkdownChunker], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        kind(**options)


class Plugin:
    """A chunker as somebody else writes it."""

    name: str = "mine"
    version: str = "3"

    def __init__(self, pieces: Any = (), parameters: Any = None) -> None:
        self.parameters: Mapping[str, JsonValue] = {} if parameters is None else parameters
        self._pieces = pieces

    def split(self, text: str) -> Sequence[Piece]:
        pieces: Sequence[Piece] = self._pieces
        return pieces


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([Piece(0, 11)], "piece 0 is [0:11], which is empty or outside of 10 characters"),
        ([Piece(3, 3)], "piece 0 is [3:3], which is empty"),
        ([Piece(5, 4)], "piece 0 is [5:4], which is empty"),
        ([Piece(-4, 4)], "piece 0 is [-4:4], which is empty or outside"),
        ([Piece(3, 5), Piece(2, 9)], "piece 1 starts at 2, before the one before it, which starts at 3"),
        ([Piece(0, 2.0)], "piece 0 has offsets that are not integers: 0 and 2.0"),  # type: ignore[arg-type]
        ([Piece(False, 2)], "piece 0 has offsets that are not integers: False and 2"),
        ([Piece(0, 2, None)], "piece 0 has a section_id that is not a text"),  # type: ignore[arg-type]
        ([Piece(0, 2, "x" * 513)], "piece 0 has a section_id that is not a text of at most 512 bytes"),
        ([Piece(0, 2, "\ud800")], "piece 0 has a section_id that is not a text"),
        (["some text"], "piece 0 is str, not Piece(start, end, section_id)"),
        ([(0, 4)], "piece 0 is tuple, not Piece(start, end, section_id)"),
    ],
)
def test_a_chunker_that_returns_nonsense_is_named_with_the_document(pieces: Any, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        pieces_of(Plugin(pieces), "0123 56789", "docs/a.md")
    assert caught.value.message == f"chunker 'mine' on document 'docs/a.md': {told}" or told in caught.value.message
    assert "text[start:end]" in caught.value.hint


def test_pieces_of_a_plugin_may_overlap_leave_gaps_and_be_blank() -> None:
    pieces = [Piece(0, 4, "a"), Piece(0, 5), Piece(4, 5), (5, 7, "b"), Piece(7, 10)]
    assert pieces_of(Plugin(iter(pieces)), "0123 56789", "doc") == [
        Piece(0, 4, "a"),
        Piece(0, 5),
        Piece(5, 7, "b"),
        Piece(7, 10),
    ]


def test_a_recipe_is_what_decides_how_texts_are_cut() -> None:
    recipe = Recipe.of(MarkdownChunker(size=500, overlap=50))
    assert parse_json(recipe.text) == {
        "name": "markdown",
        "version": f"1+{version('semantic-text-splitter')}",
        "parameters": {"size": 500, "overlap": 50},
    }
    recipes = [Recipe.of(kind(*sized)) for kind in CHUNKERS for sized in ((500, 50), (500, 0), (501, 50))]
    assert len({each.digest for each in recipes}) == len({each.text for each in recipes}) == 6
    assert Recipe.of(MarkdownChunker(500, 50)) == recipe


def test_recipes_never_change() -> None:
    """A changed digest would cut and embed all documents of all users again."""
    recipe = Recipe.of(Plugin(parameters={"window": 3, "model": "é"}))
    assert recipe.text == '{"name":"mine","parameters":{"model":"é","window":3},"version":"3"}'
    assert recipe.digest.hex() == "e27def9c75205074d0cb4841ce972eeeb8325694ec6124b179d5b4959a58f681"


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"model": object()}, "the parameters of chunker 'mine' are not JSON: $.parameters.model"),
        ({"n": float("inf")}, "the parameters of chunker 'mine' are not JSON: $.parameters.n"),
        ([1], "the parameters of chunker 'mine' must be a mapping, got list"),
    ],
)
def test_parameters_that_are_no_json_are_refused(parameters: Any, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe.of(Plugin(parameters=parameters))
    assert told in caught.value.message
    assert "changes the pieces" in caught.value.hint


@pytest.mark.parametrize("field", ["name", "version"])
def test_a_chunker_needs_a_name_and_a_version_of_text(field: str) -> None:
    chunker = Plugin()
    setattr(chunker, field, 3)
    with pytest.raises(ValidationError, match=f"the {field} of .*chunker.* must be text, got int"):
        Recipe.of(chunker)


def held_text() -> str:
    """Without long lines, which the splitter cuts in its own way."""
    blocks = [f"Block {number}. {'word ' * (number * 37 % 61)}".strip() for number in range(40)]
    for number in range(0, 40, 9):
        blocks[number] = f"{'#' * (1 + number % 4)} Part {number}\n\n{blocks[number]}"
    blocks[20] = "```\n" + "\n\n".join(f"# line {number}" for number in range(40)) + "\n```"
    blocks[30] = "\n".join(f"- item {number} {'x' * (number * 7 % 40)}" for number in range(30))
    return "\n\n".join(blocks)


STARTS = {
    TextChunker: [
        *(0, 234, 494, 859, 1214, 1375, 1718, 1999, 2216, 2427, 2837, 3064, 3322, 3377, 3798, 4099, 4280, 4587, 4727),
        *(5038, 5229, 5405, 5731, 6156, 6563, 6805, 7082, 7284),
    ],
    MarkdownChunker: [
        *(0, 234, 494, 859, 1270, 1375, 1718, 1999, 2216, 2589, 2837, 3008, 3443, 3798, 4099, 4280, 4643, 4727, 5038),
        *(5405, 5731, 6156, 6563, 6861, 7082, 7284),
    ],
}


@both
def test_cuts_never_change_without_another_version(kind: type[TextChunker] | type[MarkdownChunker]) -> None:
    """Whoever changes how texts are cut raises ADAPTER, and only then these numbers."""
    assert kind().version.startswith("1+")
    assert [start for start, _, _ in kind(size=500, overlap=60).split(held_text())] == STARTS[kind]


def cut_plainly(text: str, whole: Span, borders: list[Border], size: int) -> list[Span]:
    """What `cut` promises, written down without any care for time."""

    def strength(border: Border) -> tuple[int, int, int]:
        at, kind = border
        return kind, xxhash.xxh32_intdigest(text[at : at + 64].partition("\n")[0].encode()) >> 4, at

    inside = [border for border in borders if whole.start < border[0] < whole.end]
    if whole.end - whole.start <= size or not inside:
        return [whole]

    def beyond(margin: int, weakest: int) -> list[Border]:
        return [
            (at, kind) for at, kind in inside if whole.start + margin <= at <= whole.end - margin and kind <= weakest
        ]

    for among in (
        beyond(size * 3 // 10, PARAGRAPH),
        beyond(size // 10, PARAGRAPH),
        beyond(size * 3 // 10, LINE),
        beyond(size // 10, LINE),
        inside,
    ):
        if among:
            middle, _ = min(among, key=strength)
            break
    return [
        *cut_plainly(text, Span(whole.start, middle), borders, size),
        *cut_plainly(text, Span(middle, whole.end), borders, size),
    ]


@often
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=60), st.integers(1, 60), st.integers(0, 9))
def test_texts_are_cut_at_the_strongest_border(steps: list[tuple[int, int]], size: int, first: int) -> None:
    """Against a plain writing of the same rule."""
    borders: list[Border] = []
    at = 0
    for step, kind in steps:
        at += step + 1
        borders.append((at, kind))
    text = "".join("abc\nd efg"[place * place % 8] for place in range(at + 20))
    whole = Span(first, len(text))
    assert cut(text, whole, borders, size) == cut_plainly(text, whole, borders, size)


@pytest.mark.parametrize("count", [63, 64, 65, 4095, 4096, 4097, 5000])
def test_texts_of_many_lines_are_cut_at_the_strongest_border(count: int) -> None:
    text = "".join(f"{number * 7919 % 10007}\n" for number in range(count))
    borders = [(at + 1, LINE) for at, mark in enumerate(text) if mark == "\n"]
    whole = Span(0, len(text))
    assert cut(text, whole, borders, 3000) == cut_plainly(text, whole, borders, 3000)


def test_a_text_sorted_by_our_own_hash_is_cut_in_no_time() -> None:
    """The strongest border is always the first one: looking at all of the others each time would take minutes."""
    lines = sorted(
        (f"{number} word" for number in range(60_000)), key=lambda line: xxhash.xxh32_intdigest(line.encode())
    )
    found = TextChunker(size=100).split("\n".join(lines))
    assert len(found) > 10_000


def test_the_splitter_is_loaded_when_a_line_is_too_long_and_not_before() -> None:
    code = (
        "import sys; from ragfence.documents.chunking.chunker import MarkdownChunker, TextChunker; "
        "TextChunker().split('a b'); print('semantic_text_splitter' in sys.modules); "
        "MarkdownChunker(5).split('aaaa bbbb'); print('semantic_text_splitter' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "True"]
