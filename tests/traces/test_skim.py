"""Large JSON is cut down, and what is left says the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.skim import Document, Shortener, is_document, is_whole

TEXT = (
    st.text(max_size=20)
    | st.text(alphabet='\\"{}[]n', max_size=60)
    | st.sampled_from(["x" * 600, '\\"' * 400, "é" * 300])
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
CUTS = st.lists(st.integers(1, 700), min_size=1, max_size=8)


def pieces(data, sizes):
    """`data` in pieces of these sizes, over and over."""
    at, number = 0, 0
    while at < len(data):
        yield data[at : at + sizes[number % len(sizes)]]
        at += sizes[number % len(sizes)]
        number += 1


def shortened(data, sizes=(1 << 20,)):
    shortener = Shortener()
    return b"".join(shortener.feed(piece) for piece in pieces(data, sizes))


def same(short, whole):
    if isinstance(whole, str):
        return short == whole or (not is_whole(short) and whole.startswith(short[:-1]) and len(whole.encode()) > 200)
    if isinstance(whole, list):
        return len(short) == len(whole) and all(map(same, short, whole))
    if isinstance(whole, dict):
        return len(short) <= len(whole) and all(same(short[key], whole[key]) for key in short if is_whole(key))
    return short == whole


@given(VALUES, CUTS, st.booleans())
def test_long_strings_are_cut_and_everything_else_stays(value, sizes, ascii_only):
    whole = json.dumps(value, ensure_ascii=ascii_only).encode()
    short = shortened(whole, sizes)
    assert same(json.loads(short.decode("utf-8", "replace")), json.loads(whole))
    assert short == shortened(whole), "however it arrives"


@given(st.binary(max_size=400), CUTS)
def test_what_is_no_json_comes_out_the_same_however_it_arrives(data, sizes):
    assert shortened(data, sizes) == shortened(data)


def test_a_long_string_leaves_its_beginning():
    assert json.loads(shortened(json.dumps("<tag>" + "x" * 9999).encode())) == "<tag>" + "x" * 59 + "\ufdd0"
    assert json.loads(shortened(json.dumps("a\n" + "x" * 9999).encode())) == "a\ufdd0"


MESSAGES = st.lists(st.dictionaries(TEXT.filter(lambda key: len(key) < 100), VALUES, max_size=4), max_size=5)


def without_lists(value):
    if isinstance(value, list):
        return []
    return {key: without_lists(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@given(MESSAGES, st.dictionaries(TEXT, VALUES, max_size=3), CUTS, st.sampled_from([None, 2]))
def test_every_message_of_a_document_comes_out_without_its_lists(messages, others, sizes, indent):
    others.pop("messages", None)
    data = json.dumps(
        {**others, "sessionId": "s", "more": {}, "messages": messages, "end": [{}]}, indent=indent
    ).encode()
    document = Document()
    found = [json.loads(m.decode("utf-8", "replace")) for piece in pieces(data, sizes) for m in document.feed(piece)]
    assert found[0] == {"sessionId": "s"}
    assert len(found) == 1 + len(messages)
    assert all(same(short, without_lists(whole)) for short, whole in zip(found[1:], messages, strict=True))
    assert document.complete
    assert document.lost == 0


def test_a_message_that_is_large_without_its_texts_and_lists_is_given_up():
    large = {str(n): {"a": n} for n in range(30_000)}
    document = Document()
    data = json.dumps({"messages": [{"a": 1}, large, {"b": [large]}]}).encode()
    assert [json.loads(m) for m in document.feed(data)] == [{}, {"a": 1}, {"b": []}]
    assert document.lost == 1


@pytest.mark.parametrize(
    ("head", "is_one"),
    [
        (b'{"info":{"id":"x"},"messages":[{"info"', True),
        (b'{\n  "sessionId": "x",\n  "messages": [', True),
        (b'{"messages":{}}', False),
        (b'{"a":{"messages":[]}}', False),
        (b'{"a":1}\n{"messages":[]}', False),
        (b'{"a":"\\"messages\\":["}', False),
        (b"", False),
        (b"]]}{[", False),
    ],
)
def test_a_document_is_one_object_with_a_list_of_messages(head, is_one):
    assert is_document(head) is is_one
