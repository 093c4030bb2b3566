"""Structured output: what a reply has to be, as a formal language that its tokens are held to.

The language is llguidance's work: it compiles a schema, and tells of each token of the vocabulary
whether it may come next. This package says what it is given, and bounds what that may cost.
"""
