"""Which files belong to a data set: one rule for folders, links, globs and object stores.

1. A folder stands for every `*.parquet` below it.
2. Names that start with `.` or `_`, of files and folders, are taken only where the path spells their first letter.
3. A wildcard that matches a folder stands for that folder, as in 1; `**` spans any number of folders.
4. Links are followed. A file with several names is taken once; a link to a folder that it lies in is not entered.
5. The folder of a mask is not data, unless the path before the first wildcard names it or a part of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import fsspec

from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.io.paths import AnyPath, RemotePath, check_no_secret, faults, full_name, is_below, readable, redact

_MASK_RECORD, _MASK_KEY = "_manifest.json", b'"plan_hash"'
_MATCHED, _INSIDE = -1, -2

States = frozenset[int]


def expand(path: str | Sequence[str], *, option: str = "data.path", wanted: str = "a parquet file") -> list[AnyPath]:
    """Finds the files that a path, or several, stand for: files, folders, globs, or fsspec URLs of any of these.

    Args:
        path: one path or several; a file that several of them match is taken once.
        option: what the user calls it, for errors.
        wanted: what a file is to be, for errors.

    Returns:
        At least one file, sorted by name as text, so part-10 comes before part-2.

    Raises:
        ConfigError: If no path is given.
        DataFileError: If a path matches nothing, cannot be listed, or matches a pipe or a device.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    if not patterns or not all(patterns):
        raise ConfigError(f"{option} must name at least one file, directory, glob or URL, got {path!r}.")
    found: list[AnyPath] = []
    for pattern in patterns:
        is_remote = "://" in pattern and not pattern.startswith("file://")
        if is_remote:
            check_no_secret(option, pattern)
        with faults(redact(pattern), "listed", is_remote=is_remote):
            matches = _expand_url(pattern) if is_remote else _expand_local(pattern.removeprefix("file://"))
        if not matches:
            raise DataFileError(
                f"{option}: nothing matches {redact(pattern)!r}; pass {wanted}, a directory that holds "
                "*.parquet files, a glob or an fsspec URL."
            )
        found += matches
    first: dict[str, AnyPath] = {}
    for match in sorted(found, key=lambda match: (_is_linked(match), str(match))):
        first.setdefault(full_name(match), match)
    return sorted(first.values(), key=str)


class Matcher:
    """Which of the names below a folder belong to a pattern, name by name.

    Args:
        pattern: names and wildcards below the folder; empty for the folder itself.
    """

    def __init__(self, pattern: Sequence[str]) -> None:
        self._pattern = list(pattern)
        while self._pattern and self._pattern[-1] == "**":  # any folder below: the same as the folder
            self._pattern.pop()
        self.start = self._close({0})

    def step(self, states: States, name: str) -> States:
        """The states below a name; none if nothing with this name belongs."""
        is_visible = not name.startswith((".", "_"))
        following = set()
        for state in states:
            wanted = "**" if state < 0 else self._pattern[state]
            if state < 0 and is_visible:
                following.add(_INSIDE)
            elif state >= 0 and wanted == "**" and is_visible:
                following.add(state)
            elif state >= 0 and fnmatchcase(name, wanted) and (is_visible or name[0] == wanted[0]):
                following.add(state + 1)
        return self._close(following)

    def is_file(self, states: States, name: str) -> bool:
        """Whether the file of this name, which led to the states, belongs."""
        return _MATCHED in states or (_INSIDE in states and name.endswith(".parquet"))

    def takes_all(self, states: States) -> bool:
        """Whether files at any depth below may belong."""
        return any(state < 0 or self._pattern[state] == "**" for state in states)

    def _close(self, states: set[int]) -> States:
        closed = set()
        for state in states:
            while 0 <= state < len(self._pattern) and self._pattern[state] == "**":
                closed.add(state)
                state += 1
            closed.add(_MATCHED if state == len(self._pattern) else state)
        return frozenset(closed)


def _split(path: str) -> tuple[str, list[str]]:
    """The folder before the first wildcard, and the names and wildcards below it."""
    names = path.split("/")
    first = next((i for i, name in enumerate(names) if any(letter in name for letter in "*?[")), len(names))
    return "/".join(names[:first]) or ("/" if path.startswith("/") else "."), [name for name in names[first:] if name]


# ---- this machine


def _expand_local(path: str) -> list[AnyPath]:
    path = os.path.expanduser(path)
    if os.path.lexists(path) and not os.path.isdir(path):
        found = [path] if os.path.exists(path) else []
    else:
        root, pattern = (path, []) if os.path.isdir(path) else _split(path)
        matcher = Matcher(pattern)
        found = list(_walk(root, matcher, matcher.start, set())) if os.path.isdir(root) else []
    for name in found:
        _check_regular(name)
    return [Path(_without_dots(name)) for name in found]


def _walk(folder: str, matcher: Matcher, states: States, seen: set[tuple[str, States]]) -> Iterator[str]:
    """The files below a folder that belong; a folder that was seen is not entered again."""
    real = os.path.realpath(folder)
    if (real, states) in seen:
        return
    seen.add((real, states))
    with os.scandir(folder) as entries:
        # links last: what has a name of its own is found by that
        listed = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
    for entry in listed:
        path = os.path.join(folder, entry.name)
        if not (below := matcher.step(states, entry.name)):
            continue
        if not entry.is_dir():
            if matcher.is_file(below, entry.name):
                yield path
        elif not (entry.is_symlink() and is_below(real, os.path.realpath(path))) and not _is_mask(Path(path)):
            yield from _walk(path, matcher, below, seen)


def _check_regular(path: str) -> None:
    """Raises a DataFileError for what would be waited for in vain; the shell's own pipes are below /dev."""
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode) and not path.startswith("/dev/"):
        raise DataFileError(f"{path} is a pipe or a device, not a file; move it or pass other files.")


def _without_dots(path: str) -> str:
    """The path without `.` and `..`, unless a link in it makes that another file."""
    short = os.path.normpath(path)
    return short if os.path.exists(short) and os.path.samefile(short, path) else path


def _is_linked(path: AnyPath) -> bool:
    return isinstance(path, Path) and os.path.abspath(path) != os.path.realpath(path)


# ---- object stores


def _expand_url(url: str) -> list[AnyPath]:
    filesystem, path = fsspec.core.url_to_fs(url)
    if filesystem.isfile(path):
        return [RemotePath(filesystem, path)]
    root, pattern = (path, []) if filesystem.isdir(path) else _split(path)
    matcher = Matcher(pattern)
    return list(_list(RemotePath(filesystem, root.rstrip("/") or root), matcher, matcher.start))


def _list(folder: RemotePath, matcher: Matcher, states: States) -> Iterator[RemotePath]:
    """Lists a level at a time as long as the pattern names the levels, and then all below at once."""
    filesystem = folder.filesystem
    if matcher.takes_all(states):
        yield from _find(folder, matcher, states)
        return
    try:
        listed = filesystem.ls(folder.path, detail=True)
    except FileNotFoundError:
        return
    for entry in listed:
        child = RemotePath(filesystem, entry["name"].rstrip("/"))
        below = matcher.step(states, child.name) if child.name and child.path != folder.path else frozenset()
        if below and entry["type"] != "directory":
            if matcher.is_file(below, child.name):
                yield child
        elif below and not _is_mask(child):
            yield from _list(child, matcher, below)


def _find(folder: RemotePath, matcher: Matcher, states: States) -> Iterator[RemotePath]:
    paths = folder.filesystem.find(folder.path)
    # the hub quotes the slashes of a revision
    plain = {path: path if path.startswith(folder.path) else unquote(path) for path in paths}
    names = {path: name[len(folder.path) :].strip("/").split("/") for path, name in plain.items()}
    masks = [
        tuple(parts[:-1])
        for path, parts in names.items()
        if parts[-1] == _MASK_RECORD and len(parts) > 1 and _is_record(RemotePath(folder.filesystem, path))
    ]
    for path, parts in names.items():
        below = states
        for name in parts:
            below = matcher.step(below, name) if name else frozenset()
        is_in_mask = any(tuple(parts[: len(mask)]) == mask for mask in masks)
        if matcher.is_file(below, parts[-1]) and not is_in_mask:
            yield RemotePath(folder.filesystem, path)


# ---- masks


def _is_mask(folder: AnyPath) -> bool:
    record = folder / _MASK_RECORD
    if isinstance(record, Path) and not record.is_file():
        return False
    return record.exists() and _is_record(record)


def _is_record(path: AnyPath) -> bool:
    with readable(path) as source:
        return _MASK_KEY in source.read(4096)
