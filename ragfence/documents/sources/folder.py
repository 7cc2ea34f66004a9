"""Documents in a folder, and in a single file.

A document is named by its path below the folder, in POSIX form and NFC, so it has the same doc_id on every machine.
Its `source_url` is that path as a relative URL (percent-encoded), below `base_url` if one is given: a link that works
where the folder is published, and never the path of the machine that happened to read it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from unicodedata import normalize
from urllib.parse import quote

from ragfence.documents.document import Document
from ragfence.documents.sources.content import LIMIT_BYTES, Reading, reading
from ragfence.documents.sources.ignoring import IGNORED, Ignore
from ragfence.documents.sources.protocol import Item
from ragfence.errors import DocumentInvalid, RagfenceError, StoreUnavailable, ValidationError

IGNORE_FILE = ".ragfenceignore"

# As git's racy index has it: a file changed twice within one tick of its clock has the same mtime both times, so a
# state taken just after the first change would hide the second. Until the mtime is older than any clock's tick (2 s on
# FAT, the coarsest), the file has no state and is read again. One from the future is never old enough.
FRESH_NS = 2 * 10**9


class FolderSource:
    """Every text, Markdown and HTML file below `root`, sorted by path.

    `ignore` holds patterns as in .gitignore, on top of hidden files, `node_modules` and `__pycache__` and those in the
    file `.ragfenceignore` at the root; a pattern with `!` takes back an earlier one. A link to a file is followed if
    it ends inside the folder, a link to a folder never (what it leads to is either outside, or read anyway).

    `name` tells this source from others. It defaults to the name of the folder alone, so two folders of the same name
    need it, or the prune of one would retract the documents of the other.

    >>> FolderSource("handbook", ignore=["drafts/", "*.tmp.md"]).name
    'folder:handbook'
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name: str | None = None,
        extensions: Mapping[str, str] | Iterable[str] | None = None,
        ignore: Iterable[str] = (),
        encoding: str = "utf-8",
        base_url: str = "",
        limit_bytes: int = LIMIT_BYTES,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        # Absolute: a process that changes its folder must still find what it listed.
        self._root = os.path.abspath(root)
        self._name = f"folder:{name or normalize('NFC', shown(os.path.basename(self._root))) or '/'}"
        self._reading = reading(extensions, encoding, limit_bytes)
        self._ignore = patterns(ignore)
        self._base_url = f"{base_url.rstrip('/')}/" if base_url else ""
        self._now_ns = now_ns

    @property
    def name(self) -> str:
        return self._name

    def items(self) -> Iterator[Item]:
        ignore = Ignore([*IGNORED, *self._ignore_file(), *self._ignore])
        inside = os.path.realpath(self._root)
        try:
            walked = os.stat(self._root)
            open_folders = [("", iter(self._listed("", ignore)))]
        except OSError as error:
            raise unusable(error, self._name, self._root) from error
        # A stack of our own: a tree may be deeper than Python lets functions call each other.
        while open_folders:
            folder, names = open_folders[-1]
            name = next(names, None)
            if name is None:
                open_folders.pop()
            elif name.endswith("/"):
                try:
                    open_folders.append((folder + name, iter(self._listed(folder + name, ignore))))
                except (FileNotFoundError, NotADirectoryError):
                    pass  # it was removed in the meantime
                except OSError as error:
                    why = str(error.strerror)
                    yield Item(_doc_id(folder + name), "", partial(self._refuse_folder, folder + name, why))
            else:
                item = self._item(folder + name, inside)
                if item is not None:
                    yield item
        self._refuse_other_root(walked)

    def _listed(self, folder: str, ignore: Ignore) -> list[str]:
        """The names of one folder, sorted, those of folders with a slash at the end. Names only: there may be many.

        The slash takes part in the order, so that all paths of the tree come in theirs (`a-b` before `a/c`).
        """
        names = []
        with os.scandir(os.path.join(self._root, folder)) as entries:
            for entry in entries:
                path = normalize("NFC", folder + entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if not ignore.skips(f"{path}/"):
                        names.append(f"{entry.name}/")
                elif self._reading.takes(entry.name) and not ignore.skips(path):
                    names.append(entry.name)
        names.sort()  # two names may be one after NFC; then this decides
        names.sort(key=partial(normalize, "NFC"))
        return names

    def _item(self, relative: str, inside: str) -> Item | None:
        path = os.path.join(self._root, relative)
        now_ns = self._now_ns()  # before the file is looked at, so that it is rather too young than too old
        linked = False
        try:
            found = os.lstat(path)
            linked = stat.S_ISLNK(found.st_mode)
            if linked:
                real = os.path.realpath(path, strict=True)
                if not _is_inside(real, inside):
                    return None
                found = os.stat(real)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return None  # removed in the meantime, or a link to nothing or to itself
            return Item(_doc_id(relative), "", partial(self._load, relative, linked=linked))  # which says what is wrong
        if not stat.S_ISREG(found.st_mode):
            return None
        state = state_of(found, now_ns, self._reading.manner(relative, self._base_url))
        return Item(_doc_id(relative), state, partial(self._load, relative, linked=linked))

    def _load(self, relative: str, *, linked: bool) -> Document:
        doc_id = _doc_id(relative)
        if not _is_text(relative):
            raise DocumentInvalid(
                f"the name of {doc_id} ({self._name}) is not UTF-8", hint="rename the file", doc_id=doc_id
            )
        path = os.path.join(self._root, relative)
        if linked:
            # Looked at again: since it was listed, it may have been bent to a file outside.
            path = os.path.realpath(path)
            if not _is_inside(path, os.path.realpath(self._root)):
                raise DocumentInvalid(
                    f"{doc_id} ({self._name}) is a link that leads out of the folder",
                    hint="copy the file into the folder, or ignore the link",
                    doc_id=doc_id,
                )
        return read_document(path, doc_id, self._reading, source=self._name, base_url=self._base_url)

    def _refuse_folder(self, relative: str, why: str) -> Document:
        raise DocumentInvalid(
            f"the folder {_doc_id(relative)} ({self._name}) cannot be listed: {why}",
            hint="make it readable, or ignore it",
        )

    def _refuse_other_root(self, walked: os.stat_result) -> None:
        """A drive that was unmounted in the middle of the walk looks like files that were removed; they were not."""
        try:
            same = os.path.samestat(walked, os.stat(self._root))
        except OSError:
            same = False
        if not same:
            raise StoreUnavailable(
                f"{self._name}: {shown(self._root)} was taken away or replaced while it was read", hint="run it again"
            )

    def _ignore_file(self) -> list[str]:
        try:
            return Path(self._root, IGNORE_FILE).read_text(encoding="utf-8-sig").split("\n")
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise unusable(error, self._name, self._root) from error
        except (OSError, UnicodeDecodeError) as error:
            # Going on without it would read what somebody wanted to keep out.
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValidationError(
                f"{IGNORE_FILE} ({self._name}) cannot be read: {why}", hint="make it readable, or remove it"
            ) from error


class FileSource:
    """One text, Markdown or HTML file. Its doc_id is the file's name."""

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        name: str | None = None,
        extensions: Mapping[str, str] | Iterable[str] | None = None,
        encoding: str = "utf-8",
        base_url: str = "",
        limit_bytes: int = LIMIT_BYTES,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = os.path.abspath(file)
        base = os.path.basename(self._path)
        self._doc_id = _doc_id(base)
        self._name = f"file:{name or self._doc_id}"
        self._reading = reading(extensions, encoding, limit_bytes)
        self._base_url = f"{base_url.rstrip('/')}/" if base_url else ""
        self._now_ns = now_ns
        if not self._reading.takes(base):
            extension = os.path.splitext(base)[1]
            raise ValidationError(
                f"nobody knows how to read {shown(base)!r} as text",
                hint=f"known: {', '.join(sorted(self._reading.types))}; for a text file of another kind pass "
                f"extensions={[extension]!r}",
            )

    @property
    def name(self) -> str:
        return self._name

    def items(self) -> Iterator[Item]:
        now_ns = self._now_ns()
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise unusable(error, self._name, self._path) from error
        manner = self._reading.manner(self._doc_id, self._base_url)
        yield Item(self._doc_id, state_of(found, now_ns, manner), self._load)

    def _load(self) -> Document:
        # Whoever named the file meant what it links to.
        path = os.path.realpath(self._path)
        return read_document(path, self._doc_id, self._reading, source=self._name, base_url=self._base_url)


def state_of(found: os.stat_result, now_ns: int, manner: str = "") -> str:
    """Size and mtime, and how it is read; nothing as long as the mtime is too fresh to be relied on."""
    return f"{found.st_size}:{found.st_mtime_ns}{manner}" if now_ns - found.st_mtime_ns > FRESH_NS else ""


def read_document(path: str, doc_id: str, how: Reading, *, source: str, base_url: str) -> Document:
    """If the file changed after it was listed, this is the newer content under the older state.

    The next listing then has another state, and the file is read again. Only a file that by then is back at the size
    and mtime it was listed with would be missed.
    """
    try:
        # Not through a link and not waiting for a pipe, which may have taken the place of the file since.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DocumentInvalid(f"{doc_id} ({source}) is no file any more", hint="run it again", doc_id=doc_id)
            how.refuse_size(found.st_size, doc_id, source)
            data = file.read(how.limit_bytes + 1)
    except FileNotFoundError:
        raise DocumentInvalid(
            f"{doc_id} ({source}) was removed before it was read", hint="run it again", doc_id=doc_id
        ) from None
    except OSError as error:
        said = f"{doc_id} ({source}) cannot be read: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR):
            raise DocumentInvalid(said, hint="make the file readable, or ignore it", doc_id=doc_id) from error
        raise StoreUnavailable(said, hint="check the disk or the network drive, then try again") from error
    return how.document(data, doc_id, source=source, source_url=base_url + quote(doc_id))


def unusable(error: OSError, source: str, path: str) -> RagfenceError:
    """The error for a source that cannot be listed or read at all."""
    said = f"{source}: cannot read {shown(path)}: {error.strerror}"
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError | IsADirectoryError):
        return ValidationError(said, hint="check the path and its permissions")
    return StoreUnavailable(said, hint="check the disk or the network drive, then try again")


def patterns(ignore: Iterable[str]) -> tuple[str, ...]:
    """Checked at once, where they are given, and not when the first item is wanted."""
    if isinstance(ignore, str):
        raise ValidationError(
            f"ignore must be several patterns, got the text {ignore!r}", hint=f"for example ignore=[{ignore!r}]"
        )
    kept = tuple(ignore)
    Ignore(kept)
    return kept


def shown(name: str) -> str:
    """A file name that can be printed and stored, also if it is not UTF-8."""
    return name if _is_text(name) else os.fsencode(name).decode("utf-8", "backslashreplace")


def _doc_id(relative: str) -> str:
    return normalize("NFC", shown(relative))


def _is_text(name: str) -> bool:
    """False for bytes that are no UTF-8, which Python carries along as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_inside(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith(os.sep) else root + os.sep)
