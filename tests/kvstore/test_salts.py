"""Salts and keys: what separates cache domains."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from headrace.core.chain import as_token_ids, block_digests, root_digest
from headrace.core.errors import ConfigError
from headrace.kvstore import Kind, SaltBook
from headrace.kvstore.objects import object_key, split_key
from headrace.kvstore.records import claim_name, record_key


def test_the_salt_is_made_once_and_is_the_owners_only(tmp_path):
    folder = str(tmp_path / "store")
    book = SaltBook.ensure(folder)
    path = tmp_path / "store" / "salt"
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == 32
    assert SaltBook.ensure(folder).salt("a") == book.salt("a")
    assert len(book.salt("a")) == 32
    assert [p.name for p in path.parent.iterdir()] == ["salt"]  # nothing temporary is left
    other = SaltBook.ensure(str(tmp_path / "other"))
    assert other.salt("a") != book.salt("a")


def test_many_processes_and_threads_agree_on_one_salt(tmp_path):
    code = (
        "import sys; from headrace.kvstore.salts import SaltBook;"
        "sys.stdin.read(1); print(SaltBook.ensure(sys.argv[1]).salt('a').hex())"
    )
    folder = str(tmp_path / "store")
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", code, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(SaltBook.ensure(folder).salt("a").hex()))
        for _ in range(8)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found += [process.communicate(timeout=30)[0].strip() for process in started]
    assert len(found) == 10 and len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_salt_of_another_length_is_refused(tmp_path, content):
    (tmp_path / "salt").write_bytes(content)
    os.chmod(tmp_path / "salt", 0o600)
    with pytest.raises(ConfigError, match=f"salt must hold 32 bytes, got {len(content)}"):
        SaltBook.ensure(str(tmp_path))


def test_a_salt_that_others_may_read_is_refused(tmp_path):
    SaltBook.ensure(str(tmp_path))
    os.chmod(tmp_path / "salt", 0o644)
    with pytest.raises(ConfigError, match="got 644"):
        SaltBook.ensure(str(tmp_path))


def test_domains_share_no_digest(tmp_path):
    """G2 and G1: names that join to the same letters are two domains, and no block of one chain is
    found in the other."""
    book = SaltBook.ensure(str(tmp_path))
    names = ("", "a", "ab", "abc", "a\0", "bc")
    assert len({book.salt(name) for name in names}) == len(names)
    ids = as_token_ids(range(512))
    chains = [block_digests(root_digest(bytes(32), book.salt(name)), ids) for name in names]
    assert len({digest for chain in chains for digest in chain}) == 4 * len(names)


def test_keys_keep_kind_namespace_and_digest_apart():
    one, two = bytes(32), bytes([1]) * 32
    keys = {object_key(k, n, d) for k in Kind for n in (one, two) for d in (one, two)}
    assert len(keys) == 4 * len(Kind)
    assert split_key(object_key(Kind.SWA, one, two)) == (Kind.SWA, one, two)
    assert record_key(Kind.KV, one, two) == b"kv:" + bytes(8) + b":" + bytes([1]) * 16
    names = {record_key(k, one, two) for k in Kind} | {claim_name(object_key(Kind.KV, one, two))}
    assert len(names) == len(Kind) + 1
