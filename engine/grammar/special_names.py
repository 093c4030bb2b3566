"""Renames special tokens, so that no text of a grammar spells one.

llguidance tokenizes the text that a grammar forces (a constant, say) with the model's tokenizer,
which turns the name of a special token into the token: ``<|im_end|>`` would end the reply. With
names that no text contains, such a text becomes ordinary tokens. The ids stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

# Unicode has no such character and never will: it is for a program's own use.
MARK = "\U0010ffff"
# The mark as Rust prints it in quotes.
MARK_ESCAPED = r"\u{10ffff}"
# The ids of tokens, or in a Unigram model their scores in the order of the ids.
Vocab = dict[str, int] | list[tuple[str, float]]
# Parts of a grammar in Lark's notation: a comment, a string, a regular expression, or, as the only
# group, the name of a special token. (Ids of tokens are in brackets.)
_LARK = re.compile(
    r"""(?:\#|//)[^\n]* | "(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | <([^<>\s\[][^<>\s]*)>""",
    re.VERBOSE,
)


def with_marked_names(tokenizer: str, ends: Collection[int]) -> str:
    """The JSON of a tokenizer in which the names of special tokens have a ``MARK``.

    Special are those that llguidance does not allow in a text, and ``ends``: tokens that are
    marked as special, and added tokens in angle brackets. It takes up to a quarter of
    the time in which llguidance loads the result.
    """
    parts = msgspec.json.decode(tokenizer, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts["model"], type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(parts["added_tokens"], type=list[dict[str, Any]])
    vocab = msgspec.json.decode(model["vocab"], type=Vocab)
    if unlisted := set(ends).difference(token["id"] for token in added):
        # NOTE: the id of an added token is that of its name in the vocabulary.
        plain = {"single_word": False, "lstrip": False, "rstrip": False}
        added += [
            {"id": number, "content": name, **plain}
            for name, number in _numbered(vocab)
            if number in unlisted
        ]
    names: dict[str, str] = {}
    for token in added:
        name = token["content"]
        if token.get("special") or token["id"] in ends or (name[:1], name[-1:]) == ("<", ">"):
            names[name] = _marked(name)
            token.update(content=names[name], special=True, normalized=False)
    changed: dict[str, Any] = dict(model)
    if "merges" in model and isinstance(vocab, dict):
        changed["merges"] = _without(names, model["merges"], vocab)
    changed["vocab"] = _renamed(vocab, names)
    unknown = msgspec.json.decode(model.get("unk_token", b"null"))
    if unknown in names:
        changed["unk_token"] = names[unknown]
    return msgspec.json.encode({**parts, "added_tokens": added, "model": changed}).decode()


def lark_with_marked_names(grammar: str) -> str:
    """A grammar in Lark's notation that refers to special tokens by the changed names."""
    return _LARK.sub(lambda found: _marked(found[0]) if found[1] else found[0], grammar)


def _marked(name: str) -> str:
    """The name with a ``MARK``: before a closing bracket, because Lark's notation needs that."""
    return f"{name[:-1]}{MARK}>" if name.endswith(">") else name + MARK


def _numbered(vocab: Vocab) -> Iterable[tuple[str, int]]:
    if isinstance(vocab, dict):
        return vocab.items()
    return ((piece, number) for number, (piece, _) in enumerate(vocab))


def _renamed(vocab: Vocab, names: Mapping[str, str]) -> Vocab:
    """The vocabulary with other names; a dictionary is changed in place."""
    if isinstance(vocab, dict):
        for name in names.keys() & vocab.keys():
            vocab[names[name]] = vocab.pop(name)
        return vocab
    return [(names.get(piece, piece), score) for piece, score in vocab]


def _without(names: Mapping[str, str], merges: msgspec.Raw, vocab: Mapping[str, int]) -> object:
    """The merges without those that make one of the tokens ``names``, or continue one."""
    text = bytes(merges)
    made = any(name[:i] in vocab and name[i:] in vocab for name in names for i in range(len(name)))
    if not made and not any(msgspec.json.encode(name)[1:-1] in text for name in names):
        return merges
    pairs = msgspec.json.decode(text, type=list[tuple[str, str]])
    return [pair for pair in pairs if "".join(pair) not in names and names.keys().isdisjoint(pair)]
