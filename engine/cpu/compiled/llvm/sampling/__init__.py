"""Choices of tokens, in LLVM's language."""
