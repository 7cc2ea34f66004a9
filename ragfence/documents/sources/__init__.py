"""Where documents come from: folders, JSON Lines files, S3 prefixes, and the documents of other frameworks."""

from ragfence.documents.readers.content import EXTENSIONS
from ragfence.documents.sources.folder import FileSource, FolderSource
from ragfence.documents.sources.frameworks import DocumentsSource
from ragfence.documents.sources.jsonl import JsonlSource
from ragfence.documents.sources.registry import source_of
from ragfence.documents.sources.s3 import S3Source
from ragfence.documents.sources.source import Item, PrefixedSource, Source

__all__ = [
    "EXTENSIONS",
    "DocumentsSource",
    "FileSource",
    "FolderSource",
    "Item",
    "JsonlSource",
    "PrefixedSource",
    "S3Source",
    "Source",
    "source_of",
]
