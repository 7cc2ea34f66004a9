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
from contextlib import contextmanager
from functools import partial
from unicodedata import normalize
from urllib.parse import quote

from ragfence.core.document import Document
from ragfence.documents.readers.content import LIMIT_BYTES, ContentReader, SkippedFiles, content_reader
from ragfence.documents.sources.ignore_rules import IGNORED, Ignore
from ragfence.documents.sources.regular_files import NotRegularFileError, open_folder, open_regular_file, open_root
from ragfence.documents.sources.source import Item
from ragfence.errors import DocumentInvalid, Hint, RagfenceError, StoreUnavailable, ValidationError

IGNORE_FILE = ".ragfenceignore"
IGNORE_FILE_BYTES = 2**18

# Like git's racy index: a file changed twice within one tick of the clock has the same mtime both times, so a
# state taken just after the first change would hide the second. Until the mtime is older than any clock's tick (2 s on
# FAT, the coarsest), the file has no state and is read again. One from the future is never old enough.
FRESH_NS = 2 * 10**9


class FolderSource:
    """Every text, Markdown and HTML file below `root`, sorted by path.

    `ignore` holds patterns as in .gitignore, on top of hidden files, `node_modules` and `__pycache__` and those in the
    file `.ragfenceignore` at the root; a pattern with `!` takes back an earlier one. A link to a file is followed if
    it ends inside the folder, a link to a folder never (what it leads to is either outside, or read anyway). That
    holds at the moment a file is read, too: a folder that was swapped for a link since it was listed is an error of
    the documents in it.

    `name` identifies the source: documents belong to the source that brought them. It defaults to the path of the
    folder; pass a name if the same folder is read on several machines, or under changing paths.

    >>> FolderSource("handbook", name="handbook", ignore=["drafts/", "*.tmp.md"]).name
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
        # Absolute: a process that changes its working directory must still find what it listed.
        self._root = os.path.abspath(root)
        self._name = f"folder:{name or _doc_id(self._root)}"
        self.former_name = "" if name else f"folder:{_doc_id(os.path.basename(self._root)) or '/'}"
        self._reader = content_reader(extensions, encoding, limit_bytes)
        self._ignore = check_patterns(ignore)
        self._base_url = f"{base_url.rstrip('/')}/" if base_url else ""
        self._now_ns = now_ns
        self._skipped = SkippedFiles()

    @property
    def name(self) -> str:
        return self._name

    @property
    def skipped(self) -> SkippedFiles:
        """The files that the last listing skipped."""
        return self._skipped

    def items(self) -> Iterator[Item]:
        self._skipped = SkippedFiles()
        try:
            with open_root(self._root) as root:
                walked = os.fstat(root)
                ignore = Ignore([*IGNORED, *self._ignore_file(root), *self._ignore])
            open_folders = [("", iter(self._listed("", ignore, walked)))]
        except OSError as error:
            raise source_error(error, self._name, self._root) from error
        # A stack of our own: a tree may be deeper than Python lets functions call each other.
        while open_folders:
            folder, names = open_folders[-1]
            name = next(names, None)
            if name is None:
                open_folders.pop()
            elif name.endswith("/"):
                try:
                    open_folders.append((folder + name, iter(self._listed(folder + name, ignore, walked))))
                except FileNotFoundError:
                    pass  # removed in the meantime
                except OSError as error:
                    why = str(error.strerror)
                    yield Item(_doc_id(folder + name), "", partial(self._refuse_folder, folder + name, why))
            else:
                item = self._item(folder + name, walked)
                if item is not None:
                    yield item
        try:
            with self._opened(walked):
                pass
        except OSError:
            raise self._other_root() from None

    @contextmanager
    def _opened(self, walked: os.stat_result, folder: str = "") -> Iterator[int]:
        """Opens a folder, from the root that was listed and without following links.

        Otherwise a drive that is unmounted during the walk would look like removed files.
        """
        with open_root(self._root) as root:
            if not os.path.samestat(walked, os.fstat(root)):
                raise self._other_root()
            with open_folder(root, folder) as descriptor:
                yield descriptor

    def _listed(self, folder: str, ignore: Ignore, walked: os.stat_result) -> list[str]:
        """Returns the sorted names of one folder, names of folders with a slash at the end.

        The slash takes part in the order, so that all paths of the tree are sorted (`a-b` before `a/c`).
        """
        names = []
        with self._opened(walked, folder) as descriptor, os.scandir(descriptor) as entries:
            for entry in entries:
                path = normalize("NFC", folder + entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if not ignore.skips(f"{path}/"):
                        names.append(f"{entry.name}/")
                elif not ignore.skips(path):
                    if self._reader.takes(entry.name):
                        names.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        self._skipped.add_file(entry.name)
                    else:
                        self._skipped.special += 1
        names.sort()  # two names may be one after NFC; then this decides
        names.sort(key=partial(normalize, "NFC"))
        return names

    def _item(self, relative: str, walked: os.stat_result) -> Item | None:
        now_ns = self._now_ns()  # before the stat, so that the file seems rather too young than too old
        linked = False
        try:
            found = self._stat(relative, walked)
            linked = stat.S_ISLNK(found.st_mode)
            if linked:
                target = self._target(relative)
                if target is None:
                    self._skipped.special += 1
                    return None
                found = self._stat(target, walked)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                self._skipped.special += linked
                return None  # removed in the meantime, or a link to nothing or to itself
            # Its load raises the error.
            return Item(_doc_id(relative), "", partial(self._load, relative, walked, linked=linked))
        if not stat.S_ISREG(found.st_mode):
            self._skipped.special += 1
            return None
        state = state_of(found, now_ns, self._reader.manner(relative, self._base_url))
        return Item(_doc_id(relative), state, partial(self._load, relative, walked, linked=linked))

    def _stat(self, relative: str, walked: os.stat_result) -> os.stat_result:
        folder, name = os.path.split(relative)
        with self._opened(walked, folder) as descriptor:
            return os.stat(name, dir_fd=descriptor, follow_symlinks=False)

    def _target(self, relative: str) -> str | None:
        """Returns the path below the root that a link leads to; None if it leads outside."""
        inside = os.path.realpath(self._root)
        real = os.path.realpath(os.path.join(self._root, relative), strict=True)
        return os.path.relpath(real, inside) if _is_inside(real, inside) else None

    def _load(self, relative: str, walked: os.stat_result, *, linked: bool) -> Document:
        doc_id = _doc_id(relative)
        if not _is_text(relative):
            raise DocumentInvalid(
                f"the name of {doc_id} ({self._name}) is not UTF-8", hint="rename the file", doc_id=doc_id
            )
        with translate_read_errors(doc_id, self._name):
            # Resolved again: since the listing, the link may have been changed to a file outside.
            path = self._target(relative) if linked else relative
            if path is None:
                raise DocumentInvalid(
                    f"{doc_id} ({self._name}) is a link that leads out of the folder",
                    hint="copy the file into the folder, or ignore the link",
                    doc_id=doc_id,
                )
            folder, name = os.path.split(path)
            with self._opened(walked, folder) as descriptor:
                data = read_bytes(name, doc_id, self._reader, source=self._name, folder=descriptor)
        return self._reader.document(data, doc_id, source=self._name, source_url=self._base_url + quote(doc_id))

    def _refuse_folder(self, relative: str, why: str) -> Document:
        raise DocumentInvalid(
            f"the folder {_doc_id(relative)} ({self._name}) cannot be listed: {why}",
            hint="make it readable, or ignore it",
        )

    def _other_root(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._name}: {printable(self._root)} was removed or replaced while it was read", hint="run it again"
        )

    def _ignore_file(self, root: int) -> list[str]:
        # Without it, files would be ingested that the owner excluded.
        try:
            with open_regular_file(IGNORE_FILE, folder=root) as file:
                data = file.read(IGNORE_FILE_BYTES + 1)
            if len(data) > IGNORE_FILE_BYTES:
                raise ValidationError(
                    f"{IGNORE_FILE} ({self._name}) is larger than {IGNORE_FILE_BYTES:,} bytes",
                    hint="ignore folders instead of single files",
                )
            return data.decode("utf-8-sig").split("\n")
        except FileNotFoundError:
            return []
        except UnicodeDecodeError as error:
            raise self._bad_ignore_file("it is not UTF-8") from error
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            raise self._bad_ignore_file("it is a link" if is_link else str(error.strerror)) from error

    def _bad_ignore_file(self, why: str) -> ValidationError:
        return ValidationError(
            f"{IGNORE_FILE} ({self._name}) cannot be read: {why}",
            hint="make it a readable text file in UTF-8, or remove it",
        )


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
        self._name = f"file:{name or _doc_id(self._path)}"
        self.former_name = "" if name else f"file:{self._doc_id}"
        self._reader = content_reader(extensions, encoding, limit_bytes)
        self._base_url = f"{base_url.rstrip('/')}/" if base_url else ""
        self._now_ns = now_ns
        if not self._reader.takes(base):
            extension = os.path.splitext(base)[1]
            known = f"known: {', '.join(sorted(self._reader.types))}; for a text file of another kind "
            raise ValidationError(
                f"there is no reader for {printable(base)!r}",
                hint=Hint(
                    f"{known}pass extensions={[extension]!r}", cli=f"{known}use --ext {extension.lstrip('.') or 'EXT'}"
                ),
            )

    @property
    def name(self) -> str:
        return self._name

    def items(self) -> Iterator[Item]:
        now_ns = self._now_ns()
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise source_error(error, self._name, self._path) from error
        manner = self._reader.manner(self._doc_id, self._base_url)
        yield Item(self._doc_id, state_of(found, now_ns, manner), self._load)

    def _load(self) -> Document:
        # The caller named the file, so a link is followed.
        with translate_read_errors(self._doc_id, self._name):
            data = read_bytes(os.path.realpath(self._path), self._doc_id, self._reader, source=self._name)
        source_url = self._base_url + quote(self._doc_id)
        return self._reader.document(data, self._doc_id, source=self._name, source_url=source_url)


def state_of(found: os.stat_result, now_ns: int, manner: str = "") -> str:
    """Returns size, mtime and manner of reading; empty while the mtime is too recent to be reliable."""
    return f"{found.st_size}:{found.st_mtime_ns}{manner}" if now_ns - found.st_mtime_ns > FRESH_NS else ""


def read_bytes(path: str, doc_id: str, how: ContentReader, *, source: str, folder: int | None = None) -> bytes:
    """Reads a file. If it changed after the listing, this is the newer content under the older state.

    The next listing then has another state, and the file is read again. Only a file that has the size and mtime of the
    first listing again by then would be missed.
    """
    with open_regular_file(path, folder=folder) as file:
        how.refuse_size(os.fstat(file.fileno()).st_size, doc_id, source)
        return file.read(how.limit_bytes + 1)


@contextmanager
def translate_read_errors(doc_id: str, source: str) -> Iterator[None]:
    """Translates system errors about one file into errors of its document or of the source."""
    try:
        yield
    except FileNotFoundError:
        raise DocumentInvalid(
            f"{doc_id} ({source}) was removed before it was read", hint="run it again", doc_id=doc_id
        ) from None
    except NotRegularFileError as error:
        raise DocumentInvalid(
            f"{doc_id} ({source}) is {error.kind}, not a regular file",
            hint="write the text to a file and ingest that: pipes and devices are not read",
            doc_id=doc_id,
        ) from None
    except NotADirectoryError as error:
        raise DocumentInvalid(
            f"{doc_id} ({source}) cannot be read: a folder of its path was replaced by a link or a file",
            hint="run it again; links to folders are not followed",
            doc_id=doc_id,
        ) from error
    except OSError as error:
        said = f"{doc_id} ({source}) cannot be read: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR):
            raise DocumentInvalid(said, hint="make the file readable, or ignore it", doc_id=doc_id) from error
        raise StoreUnavailable(said, hint="check the disk or the network drive, then try again") from error


def source_error(error: OSError, source: str, path: str) -> RagfenceError:
    """Returns the error for a source that cannot be listed or read at all."""
    said = f"{source}: cannot read {printable(path)}: {error.strerror}"
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError | IsADirectoryError):
        return ValidationError(said, hint="check the path and its permissions")
    return StoreUnavailable(said, hint="check the disk or the network drive, then try again")


def check_patterns(ignore: Iterable[str]) -> tuple[str, ...]:
    """Validates patterns when the source is made, and not when the first item is listed."""
    if isinstance(ignore, str):
        raise ValidationError(
            f"ignore must be a list of patterns, not the text {ignore!r}",
            hint=Hint(f"for example ignore=[{ignore!r}]", cli=f"for example --ignore {ignore}"),
        )
    kept = tuple(ignore)
    Ignore(kept)
    return kept


def printable(name: str) -> str:
    """Returns a file name that can be printed and stored, even if it is not UTF-8."""
    return name if _is_text(name) else os.fsencode(name).decode("utf-8", "backslashreplace")


def _doc_id(relative: str) -> str:
    return normalize("NFC", printable(relative))


def _is_text(name: str) -> bool:
    """Returns False for names that are not UTF-8, whose bytes Python represents as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_inside(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith(os.sep) else root + os.sep)
