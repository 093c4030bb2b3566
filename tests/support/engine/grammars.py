"""A compiler of grammars for a small vocabulary."""

from __future__ import annotations

from functools import cache

from support.tiny import EOS_ID, IM_END_ID, VOCAB_SIZE, tiny_tokenizer

from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.language import Lexicon

TOKENIZER = tiny_tokenizer()
ENDS = (EOS_ID, IM_END_ID)


@cache
def compiler() -> Compiler:
    return Compiler(lambda: Lexicon(TOKENIZER.to_str(), VOCAB_SIZE, ENDS))
